"""Work that is cut off goes on where it stood, to the same result; and nothing is read in more memory than there is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from csympow.command import NotFiniteError
from csympow.config import ConfigError
from csympow.data.progress import Progress
from csympow.data.tokenizer import ByteTokenizer
from csympow.evaluate import caches, context, context_report, halfway, memory, sample, writing
from csympow.evaluate.generation import Drawn, Room, Sampling, generate, room_for
from csympow.evaluate.kept import Kept, anything_kept, digest
from csympow.evaluate.runs import Run
from csympow.evaluate.stretches import Stretches
from csympow.model import ModelConfig, Transformer
from csympow.softmax import KVCache
from csympow.train.stop import Stop
from tests.evaluating import arguments, make_weights

pytestmark = pytest.mark.usefixtures("quick_compilation")

TEXT = Stretches("x", 40, [np.arange(i, i + 41, dtype=np.int32) for i in range(3)], 3, joined=False)


def kept_in(directory, task):
  directory.mkdir(exist_ok=True)
  return Kept(directory, task)


def run_of(**shape):
  made = make_weights(**shape)
  return Run("tiny", "nowhere", made.config, 3, "identity", made.model, ByteTokenizer())


class CutOff(Progress):
  """Somebody loses patience after some pieces."""

  def __init__(self, pieces):
    super().__init__(1)
    self.pieces, self.found = pieces, []

  def add(self, weight, fresh=True):
    if fresh:
      self.pieces -= 1
    else:
      self.found.append(weight)
    if self.pieces < 0:
      raise InterruptedError


@pytest.fixture
def often(monkeypatch):
  """Small pieces, after each of which the pass is kept."""
  monkeypatch.setattr(caches, "PIECE", 8)
  monkeypatch.setattr(caches, "TOKENS_AT_ONCE", 80)  # two groups: of two texts and of one
  monkeypatch.setattr(halfway, "_SECONDS", 0.0)
  monkeypatch.setattr(halfway, "_SHARE", 1e9)


def test_a_pass_that_was_cut_off_goes_on_to_the_same_losses(often, tmp_path):
  run = run_of()
  whole = context.measure(run, TEXT, kept_in(tmp_path / "a", "context"), Progress(1))
  with pytest.raises(InterruptedError):
    context.measure(run, TEXT, kept_in(tmp_path / "b", "context"), CutOff(3))
  assert anything_kept(tmp_path / "b", "context")
  (path,) = (tmp_path / "b" / ".kept").glob("*.npz")
  again = CutOff(1000)
  found = context.measure(run, TEXT, kept_in(tmp_path / "b", "context"), again)
  assert again.found == [2 * 24], "two texts side by side, three pieces of each"
  jax.tree.map(np.testing.assert_array_equal, found, whole)
  assert not path.exists()


def test_gates_that_were_cut_off_go_on_to_the_same_statistics(often, tmp_path):
  run = run_of()
  whole = memory.measure(run, TEXT, kept_in(tmp_path / "a", "memory"), Progress(1))
  with pytest.raises(InterruptedError):
    memory.measure(run, TEXT, kept_in(tmp_path / "b", "memory"), CutOff(7))  # in the second
  again = CutOff(1000)
  found = memory.measure(run, TEXT, kept_in(tmp_path / "b", "memory"), again)
  assert again.found == [2 * 40, 16]
  jax.tree.map(np.testing.assert_array_equal, found, whole)
  assert not anything_kept(tmp_path / "b", "memory")


def test_what_was_half_done_and_is_damaged_is_done_again(tmp_path):
  kept = Kept(tmp_path, "context")
  cache = caches.empty_cache(run_of().model, caches.Shape(1, 8, 8, keep_keys=False))
  found = {"sums": np.ones(3)}
  skipped = []
  pass_ = halfway.HalfWay(kept, "key", found, skipped.append)
  pass_.keep(8, jax.tree.map(lambda x: x + 1, cache))
  (path,) = (tmp_path / ".kept").glob("*.npz")
  content = path.read_bytes()
  found["sums"][:] = 0
  position, resumed = pass_.resume(cache)
  assert (position, skipped, found["sums"].tolist()) == (8, [8], [1, 1, 1])
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b + 1), resumed, cache)
  for damaged in (b"", content[: len(content) // 2], b"PK" + content[2:900], content.replace(b"sums", b"smus")):
    path.write_bytes(damaged)
    assert pass_.resume(cache)[0] == 0
  other = {"sums": np.ones(4)}
  path.write_bytes(content)
  assert halfway.HalfWay(kept, "key", other, skipped.append).resume(cache)[0] == 0


def test_bfloat16_survives_being_kept(tmp_path):
  keys = jnp.arange(24, dtype=jnp.bfloat16).reshape(2, 3, 2, 2) / 7
  cache = KVCache(keys, -keys, jnp.arange(2))
  pass_ = halfway.HalfWay(Kept(tmp_path, "context"), "key", {}, lambda done: None)
  pass_.keep(8, cache)
  _, found = pass_.resume(jax.tree.map(jnp.zeros_like, cache))
  assert found.k.dtype == jnp.bfloat16
  jax.tree.map(np.testing.assert_array_equal, found, cache)


@pytest.mark.slow
def test_a_sample_that_was_cut_off_goes_on_to_the_same_text(tmp_path, monkeypatch):
  monkeypatch.setattr(writing, "_KEPT_EVERY_S", 0.0)
  monkeypatch.setattr(caches, "PIECE", 4)  # so that one program reads prompts of any length
  run, prompts = run_of(), [np.arange(5, dtype=np.int32), np.arange(3, dtype=np.int32)]
  drawn = list(generate(run.model, prompts, 7, Sampling(1.0, seed=3), first_row=4))

  def written(progress):
    kept = Kept(tmp_path, "sample")
    return writing.Writer(run, prompts, 7, Sampling(1.0, seed=3), Room(3, 6), 4, False, kept, progress).written()

  with pytest.raises(InterruptedError):
    written(CutOff(6))  # the prompts in two pieces, and four tokens
  assert anything_kept(tmp_path, "sample")
  again = CutOff(6)  # nine tokens in three pieces, and three
  found = written(again)
  assert again.found == [2 * 4]
  np.testing.assert_array_equal(found["tokens"], [one.tokens for one in drawn])
  np.testing.assert_allclose(found["log_p"], [one.log_p for one in drawn], rtol=1e-4)
  assert written(CutOff(0))["tokens"] == found["tokens"], "and is not written again"


def test_prompts_are_written_in_groups_that_fit_and_show_progress(tmp_path, monkeypatch, capsys):
  def fake(model, prompts, count, sampling, *, room, first_row, written, check):
    assert room == (2, 3)
    check(sum(map(len, prompts)))
    for number in range(count):  # of row r: "a", "b", ... from r on
      yield Drawn(97 + first_row + np.arange(len(prompts)) + number, np.zeros(len(prompts)))

  monkeypatch.setattr(caches, "_ROWS", 2)
  monkeypatch.setattr(writing, "generate", fake)
  monkeypatch.setattr(sample, "open_runs", lambda args: [run_of()])
  shown = []
  monkeypatch.setattr(Progress, "show", lambda self, text: shown.append(text))
  sample.run(arguments(sample, tmp_path, "--prompt=1", "--prompt=22", "--prompt=333", "--tokens=3"))
  printed = capsys.readouterr().out
  assert "1abc\n---\n22bcd\n---\n333cde\n---\n" in printed
  assert "state of one" in printed
  assert shown == [
    *("tiny: reading prompts", *(f"tiny: {n} of 3 tokens, 2 rows" for n in (1, 2, 3))),
    *("tiny: reading prompts", *(f"tiny: {n} of 3 tokens, 1 rows" for n in (1, 2, 3))),
  ]


def test_where_losses_stop_being_finite_is_told(tmp_path, monkeypatch, capsys):
  def stream(model, tokens, targets, shape, segments, halfway):
    losses = np.ones(tokens.shape)
    losses[1, 36:] = np.inf
    yield 0, losses[:, :20]
    yield 20, losses[:, 20:]

  monkeypatch.setattr(context, "stream", stream)
  run = run_of()
  found = context.measure(run, TEXT, Kept(tmp_path, "context"), Progress(1))
  assert found.not_finite_from == 37
  printed = context_report.write(tmp_path, [run], TEXT, [found])
  assert "tiny: losses are not finite from position 37" in printed
  assert np.isfinite(found.windows[0]).all()


def test_a_model_of_nans_is_measured_to_the_end_and_told_of(often, tmp_path, monkeypatch, capfd):
  run = run_of()
  graphdef, parameters = nnx.split(run.model)
  run = run._replace(model=nnx.merge(graphdef, jax.tree.map(lambda x: x * np.nan, parameters)))
  for task in (context, memory):
    monkeypatch.setattr(task, "open_runs", lambda args: [run])
    monkeypatch.setattr(task.stretches, "common_stretches", lambda *_: TEXT)
  with pytest.raises(NotFiniteError, match="tiny: losses are not finite from position 1"):
    context.run(arguments(context, tmp_path))
  with pytest.raises(NotFiniteError, match="tiny: gates are not finite"):
    memory.run(arguments(memory, tmp_path))
  for task in ("context", "memory"):
    for ending in ("csv", "json", "png"):
      assert (tmp_path / f"{task}.{ending}").stat().st_size > 100
  assert "losses are not finite from position 1\n" in capfd.readouterr().out


def test_losses_that_are_not_finite_are_exit_code_3(tmp_path, monkeypatch, capfd):
  from csympow.evaluate import program

  def lost(args):
    raise NotFiniteError("tiny: losses are not finite from position 37")

  monkeypatch.setattr(context, "run", lost)
  assert program._run(["--task=context", f"--out={tmp_path}"], Stop()) == 3
  assert capfd.readouterr().err == "csympow: tiny: losses are not finite from position 37\n"


def test_memory_is_bounded_whatever_is_asked():
  def of(**options):
    return nnx.eval_shape(lambda: Transformer(ModelConfig(**options), rngs=nnx.Rngs(0)))

  softmax, two, four = of(variant="softmax"), of(), of(power=4)
  for length in (1, 100, 4096, 65_536, 2**20):
    for model in (softmax, two, four):
      shape = caches.shape_for(model, length, 1000, 128)
      assert shape.slots >= length + 128
      cache = shape.rows * caches.cache_bytes(model, shape.slots, keep_keys=shape.keep_keys)
      assert shape.rows == 1 or cache <= 4 * 2**30
      if model is softmax:
        assert shape.piece == 16 or 4 * 12 * shape.rows * shape.piece * shape.slots <= 2**30
    assert room_for(softmax, [np.zeros(length, int)] * 100, 128).rows <= 64
  assert caches.shape_for(four, 65_536, 1).keep_keys  # 2.5 GB instead of 28
  assert not caches.shape_for(four, 2**20, 1).keep_keys
  assert not caches.shape_for(two, 4096, 1).keep_keys


def test_where_nothing_can_be_kept_is_refused(tmp_path):
  (tmp_path / ".kept").touch()
  with pytest.raises(ConfigError, match="what was computed cannot be kept there"):
    Kept(tmp_path, "context")


def test_lines_that_are_no_results_are_dropped(tmp_path):
  kept = Kept(tmp_path, "context")
  kept.put("a", 1)
  with (tmp_path / ".kept" / "context.jsonl").open("ab") as opened:
    opened.write(b"[" * 100_000 + b"\n" + b'{"key": 5}\n' + b"\xff\xfe\n" + b'{"key": "b", "result": 2')
  assert Kept(tmp_path, "context").get("a") == 1
  assert Kept(tmp_path, "context").get("b") is None
  assert (tmp_path / ".kept" / "context.jsonl").read_text().count("\n") == 1
  assert digest(1, "a") != digest("1a")
