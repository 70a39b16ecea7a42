"""What a run tells of its model beside the loss: held-out loss, gates, text, and the curve that ends it."""

import dataclasses
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jaxtyping import Array

from csympow.config import Config
from csympow.data.loader import Batch, Windows, batches
from csympow.data.tokenizer import Tokenizer
from csympow.evaluate import octaves
from csympow.evaluate.caches import memory_of
from csympow.evaluate.generation import continuation
from csympow.evaluate.runs import describe
from csympow.evaluate.streaming import position_losses
from csympow.gates import memory_length
from csympow.model import Transformer
from csympow.shell import python
from csympow.train import flops
from csympow.train.metrics import Journal
from csympow.train.step import Program, TrainState
from csympow.train.stop import Stop

_TEMPERATURE = 0.8
_PROMPT_TOKENS = 64


class Reports:
  """The reports of one run."""

  def __init__(
    self,
    program: Program,
    heldout: Windows | None,
    tokenizer: Tokenizer | None,
    directory: Path,
    stop: Stop,
    arguments: list[str],
  ) -> None:
    self._program, self._config, self._heldout, self._tokenizer = program, program.config, heldout, tokenizer
    self._directory, self._stop, self._arguments = directory, stop, arguments
    config = program.config
    self._lead = jax.process_index() == 0
    self._losses = jax.jit(program.summed_loss)
    self._gates = jax.jit(self._gate_statistics)
    device = jax.devices()[0]
    platform = "gpu" if device.platform in ("cuda", "rocm") else device.platform
    self._flops_per_token = flops.per_token(config, program.abstract_state().parameters, platform)
    self._device_kind = device.device_kind

  def utilisation(self, tokens_per_s: float) -> float | None:
    """MFU."""
    return flops.utilisation(tokens_per_s, self._flops_per_token, jax.device_count(), self._device_kind)

  @staticmethod
  def memory() -> int | None:
    """The most bytes of the first device that were ever in use, where the device counts them."""
    return (jax.local_devices()[0].memory_stats() or {}).get("peak_bytes_in_use")

  def due(
    self, step: int, state: TrainState, batch: Batch, say: Callable[[str], None], journal: Journal | None
  ) -> dict[str, Any]:
    """Everything that is due after this step, for the journal."""
    log, last = self._config.log, step == self._config.steps
    found: dict[str, Any] = {}
    if log.gates and (step % log.gates == 0 or last) and self._config.model.variant in ("sympow+gating", "conformal"):
      found["gates"] = self._gate_report(state.parameters, batch)
    if self._heldout is not None and log.heldout and (step % log.heldout == 0 or last):
      found["heldout_loss"] = self._heldout_loss(state.parameters)
      say(f"step {step}  held-out loss {found['heldout_loss']:.4f}")
    if log.sample and (step % log.sample == 0 or last):
      text = self._sample(state.parameters, step)
      if journal is not None:
        say(f"--- sample at step {step} ---\n{text}\n---")
        journal.text("sample", text, step)
        samples = self._directory / "samples"
        samples.mkdir(exist_ok=True)
        (samples / f"{step}.txt").write_text(text)
    return found

  @property
  def unfinished(self) -> bool:
    """Whether the curve that ends the run is still to be made."""
    wanted = self._heldout is not None and self._config.log.context_curve >= self._config.context
    return wanted and octaves.made_at(self._directory) != self._config.steps

  def final(self, state: TrainState) -> None:
    """The held-out loss against context, as a table and a picture, and what to do next."""
    config = self._config
    if self.unfinished:
      model = self._local_model(state.parameters)
      if self._lead:
        self._context_curve(model)
    if self._lead:
      print(f"done: {config.steps:,} steps, in {self._directory}\n\n{self._next_commands()}", flush=True)

  def _context_curve(self, model: Transformer) -> None:
    config = self._config
    windows, indices = self._long_windows()
    if not indices:
      print(f"no held-out document has the training context of {config.context:,} tokens: no curve")
      return
    length = windows.context
    print(
      f"\nheld-out loss against context: {len(indices)} stretches of {length:,} tokens, trained at {config.context:,}"
    )
    losses = position_losses(model, windows, indices, lambda _: self._stop.check())
    result = octaves.curve(losses)
    label = f"{describe(config.model)}: {memory_of(model, length)}"
    picture = octaves.write(result, self._directory, config.context, config.steps, label)
    print(f"{octaves.table(result, config.context)}\n{label}; plot: {picture}")

  def _long_windows(self) -> tuple[Windows, list[int]]:
    """Windows of held-out text that each lie in one document, as long as the config asks or else as there are."""
    config = self._config
    assert self._heldout is not None
    length = config.log.context_curve
    while length >= config.context:
      windows = self._heldout.of_length(length)
      count = min(config.log.context_documents, len(windows))
      indices = [int(i) for i in np.linspace(0, len(windows) - 1, count)] if count else []
      indices = [index for index in indices if windows.is_one_document(index)]
      if indices:
        return windows, indices
      length //= 2
    return self._heldout, []

  def _next_commands(self) -> str:
    other = "conformal" if self._config.model.variant == "softmax" else "softmax"
    directory = self._directory.with_name(f"{self._directory.name}-{other}")
    arguments = [x for x in self._arguments if not x.startswith("--config.model.variant=")]
    arguments += [f"--workdir={directory}", f"--config.model.variant={other}"]
    return (
      f"Try next: the same with {other} attention, and a dataset of your own texts:\n"
      f"  {python()} train.py {shlex.join(arguments)}\n"
      f"  {python()} -m csympow.data.prepare YOUR_FILES --out=data/mine"
    )

  def _heldout_loss(self, parameters: Any) -> float:
    """The mean over the first batches of the held-out windows, in an order that never changes."""
    assert self._heldout is not None
    nll, count = 0.0, 0
    layout = self._program.layout
    sharding = None if layout is None else layout.sharding("batch", "time")
    config = _with_batches(self._config, self._heldout)
    for batch in batches(self._heldout, config, sharding):
      if jax.process_count() == 1:
        self._stop.check()
      nll += float(self._losses(parameters, batch).nll)
      count += int(jnp.sum(batch.targets >= 0))
    return nll / max(1, count)

  def _gate_statistics(self, parameters: Any, batch: Batch) -> dict[str, Array]:
    log_gate, beta = self._program.model(parameters).gates(batch.tokens, batch.segment_ids)
    valid = jnp.ones_like(batch.tokens, bool) if batch.segment_ids is None else batch.segment_ids >= 0
    weights = valid[None, ..., None] / jnp.maximum(valid.sum(), 1)
    found = {}
    if log_gate is not None:
      found["memory"] = memory_length((log_gate * weights).sum((1, 2)))
    if beta is not None:
      mean = (beta * weights).sum((1, 2))
      found["beta_mean"] = mean
      found["beta_spread"] = jnp.sqrt(jnp.maximum((beta**2 * weights).sum((1, 2)) - mean**2, 0))
    return found

  def _gate_report(self, parameters: Any, batch: Batch) -> dict[str, Any]:
    """Per layer and head: tokens until a memory has faded to 1/e, and mean and spread of beta; and their extremes."""
    found = {name: np.asarray(value) for name, value in self._gates(parameters, batch).items()}
    report: dict[str, Any] = {}
    for name, by_head in found.items():
      report |= {f"{name}_min": float(by_head.min()), f"{name}_median": float(np.median(by_head))}
      report |= {f"{name}_max": float(by_head.max()), f"{name}_by_head": by_head.round(4).tolist()}
    return report

  def _sample(self, parameters: Any, step: int) -> str:
    model = self._local_model(parameters)
    if not self._lead:
      return ""
    tokenizer = self._tokenizer
    prompt = self._prompt(tokenizer)
    tokens = continuation(model, prompt, self._config.log.sample_tokens, _TEMPERATURE, seed=self._config.seed + step)
    if tokenizer is None:
      return f"{prompt.tolist()} | {tokens.tolist()}"
    return f"{tokenizer.decode(prompt)}|{tokenizer.decode(np.minimum(tokens, tokenizer.vocab_size - 1))}"

  def _prompt(self, tokenizer: Tokenizer | None) -> np.ndarray:
    if self._config.log.prompt and tokenizer is not None:
      return tokenizer.encode(self._config.log.prompt)
    if self._heldout is not None:
      return self._heldout[0][0][: min(_PROMPT_TOKENS, self._config.context)]
    return np.zeros(1, np.int32)

  def _local_model(self, parameters: Any) -> Transformer:
    """The model on this process's first device, without the mesh; all processes must ask for it together."""
    layout = self._program.layout
    if layout is not None:
      everywhere = layout.sharding()
      parameters = jax.jit(lambda tree: tree, out_shardings=everywhere)(parameters)
      parameters = jax.tree.map(lambda x: x.addressable_data(0), parameters)
    graphdef = nnx.split(nnx.eval_shape(lambda: Transformer(self._config.model, rngs=nnx.Rngs(0))))[0]
    return nnx.merge(graphdef, parameters)


def _with_batches(config: Config, heldout: Windows) -> Config:
  """The config of a held-out pass: its own few steps, no more than the windows there are."""
  steps = max(1, min(config.log.heldout_batches, len(heldout) // config.rows))
  optimizer = dataclasses.replace(config.optimizer, schedule="constant", warmup_steps=0, decay_steps=0)
  return dataclasses.replace(config, steps=steps, seed=0, optimizer=optimizer)
