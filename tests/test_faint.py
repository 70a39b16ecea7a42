"""Which heads are read without states, and what their states are about."""

import jax
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import numpy as np
import pytest

from csympow.forms import faint, full, fused_chunked, visible
from csympow.forms.centring import centre
from csympow.forms.full import Full
from csympow.gates import RESET
from csympow.prefix import Total
from kernels_pallas.gpu.heard import heard
from kernels_pallas.gpu.state_read import Found
from kernels_pallas.gpu.tiles import ROWS
from kernels_pallas.weights import INVISIBLE, LOG2E
from tests import comparing
from tests.comparing import WHERE

CHUNK, CHUNKS, WIDTH = 256, 4, 64
INTERPRETED = plgpu.InterpretGPUParams()
TIME = CHUNK * CHUNKS


def bfloat16(x):
  return np.asarray(jnp.asarray(x, jnp.bfloat16), np.float64)


def tokens(cosine, seed=0):
  """Queries, keys and values, of one head: queries at an angle to all keys, or anywhere."""
  if cosine is None:
    return tuple(bfloat16(x) for x in np.random.default_rng(seed).normal(size=(3, TIME, WIDTH)))
  x = comparing.nearly_orthogonal(cosine, T=TIME, d=WIDTH, dtype="bfloat16", seed=seed)
  return tuple(np.asarray(x[name][0, :, 0], np.float64) for name in "qkv")


def read_by_chunk(q, k, v):
  """What is found of states and features in bfloat16; and how wrong y would be, but for the first chunk's."""
  numerators, errors, weights, squares = [], [], [], []
  for start in range(0, TIME, CHUNK):
    some = slice(start, start + CHUNK)
    S = np.einsum("jau,jb->aub", bfloat16(k[:start, :, None] * v[:start, None]), k[:start], optimize=True)
    features = bfloat16(q[some, :, None] * q[some, None])
    scores = np.square(q[some] @ k[:start].T)
    numerators.append(np.einsum("iab,aub->iu", features, bfloat16(S), optimize=True))
    errors.append(numerators[-1] - scores @ v[:start])
    weights.append(np.sum(scores, axis=-1))
    squares.append(np.sum(S**2))
  numerator, error, weight = (np.concatenate(x) for x in (numerators, errors, weights))
  scores = np.tril(np.square(q @ k.T))
  total = np.maximum(np.sum(scores, axis=-1, keepdims=True), 1e-30)
  wrong, y = ((x / total)[CHUNK:] for x in (error, scores @ v))
  found = Found(jnp.float32(numerator)[None, :, None], jnp.float32(weight)[None, None])
  return (found, jnp.float32(squares)[None, None]), np.linalg.norm(wrong) / np.linalg.norm(y)


def is_faint(q, k, found, squares, *, centre_size=0.0, log_gate=0.0):
  return bool(_is_faint(jnp.float16(q), jnp.float16(k), found, squares, centre_size, log_gate))


@jax.jit
def _is_faint(q, k, found, squares, centre_size, log_gate):
  read = faint.Read(
    q=q[None, :, None],
    k=k[None, :, None],
    k_scale=jnp.ones((1, 1, TIME)),
    log_gate=jnp.full((1, 1, CHUNKS, CHUNK), log_gate),
    found=found,
    squares=squares,
    centre_size=jnp.full((1, 1), centre_size),
    head_dim=WIDTH,
    first=1,
  )
  return faint.faint(read, INTERPRETED)[0, 0]


@pytest.mark.parametrize("cosine", [None, 0.3, 0.05, 0.03, 0.01])
def test_heads_are_faint_whose_y_would_be_wrong(cosine):
  q, k, v = tokens(cosine)
  found, wrong = read_by_chunk(q, k, v)
  assert is_faint(q, k, *found) == (wrong > faint.AUDIBLE)
  assert (wrong > faint.AUDIBLE) == (cosine is not None and cosine < 0.1)


def left_by(q, k, v, decay):
  """By a chunk whose tokens leave so much of what is before them; and how wrong y is if they come again."""
  q, k, v, time = q[:CHUNK], k[:CHUNK], v[:CHUNK], np.arange(CHUNK)
  until_end, since_start = decay ** (CHUNK - 1 - time), decay ** (time + 1.0)
  S = np.einsum("jau,jb->aub", bfloat16(k[:, :, None] * v[:, None]), k * until_end[:, None], optimize=True)
  Z = np.einsum("ja,jb,j->ab", k, k, until_end, optimize=True)
  near = np.tril(np.square(q @ k.T) * decay ** np.maximum(time[:, None] - time, 0))
  far = np.square(q @ k.T) * until_end * since_start[:, None]
  found = np.einsum("iab,aub->iu", bfloat16(q[:, :, None] * q[:, None]), bfloat16(S), optimize=True)
  wrong, again = found * since_start[:, None] - far @ v, (near + far) @ v
  total = np.sum(near + far, axis=-1, keepdims=True)
  state = Full(jnp.float32(S)[None, None, None], jnp.float32(Z)[None, None])
  return state, np.linalg.norm(wrong / total) / np.linalg.norm(again / total)


@jax.jit
def _is_left_faint(q, k, state, middle, log_gate):
  def of_middle(x):  # of three blocks, the others are padding
    return jnp.pad(x, ((CHUNK, CHUNK), (0, 0)))[None, :, None]

  found = Found(jnp.zeros((1, 3 * CHUNK, 1, WIDTH)), jnp.zeros((1, 1, 3 * CHUNK)))  # of which nothing counts
  log_gates, q, k = jnp.zeros((1, 1, 3, CHUNK)), of_middle(q), of_middle(k)
  size = jnp.linalg.norm(middle, axis=-1)
  read = faint.Read(q, k, jnp.ones((1, 1, 3 * CHUNK)), log_gates, found, jnp.zeros((1, 1, 3)), size, WIDTH, 1)
  queries = jnp.moveaxis(q, 1, 3).astype(jnp.bfloat16)
  after = fused_chunked._after(full.about(state, middle), read, queries, of_middle(log_gate)[..., 0], INTERPRETED)
  return faint.faint(after, INTERPRETED)[0, 0]


def is_left_faint(q, k, state, *, middle=0.0, log_gate=0.0):
  middle, log_gate = (np.broadcast_to(np.float32(x), n) for x, n in ((middle, (1, 1, WIDTH)), (log_gate, (CHUNK, 1))))
  return bool(_is_left_faint(jnp.float16(q[:CHUNK]), jnp.float16(k[:CHUNK]), state, middle, log_gate))


@pytest.mark.parametrize(
  ("cosine", "decay"),
  [
    (0.03, 1.0),
    *(
      pytest.param(*x, marks=pytest.mark.slow)
      for x in [(None, 0.5), (None, 1.0), (0.3, 1.0), (0.3, 0.5), (0.03, 0.99), (0.01, 0.5)]
    ),
  ],
)
def test_heads_leave_too_coarse_a_state_if_y_would_be_wrong_were_their_tokens_to_come_again(cosine, decay):
  q, k, v = tokens(cosine)
  state, wrong = left_by(q, k, v, decay)
  assert is_left_faint(q, k, state, log_gate=np.log(decay)) == (wrong > faint.AUDIBLE)


def test_a_state_that_is_left_does_not_owe_its_size_to_means_nor_to_being_written_half():
  q, k, v = tokens(None)
  k, v = k + 0.5, v + 2.0
  whole, wrong = left_by(q, k, v, 1.0)
  assert wrong < faint.AUDIBLE
  quarter = np.arange(WIDTH) // (WIDTH // 4)
  half = whole._replace(S=jnp.where(quarter[:, None, None] <= quarter, whole.S, 0))  # as `symmetric_write` does
  assert not is_left_faint(q, k, half, middle=2.0)


def test_a_reset_does_not_hide_what_a_state_lacks():
  q, k, v = tokens(0.03)
  state, _ = left_by(q, k, v, 1.0)
  assert is_left_faint(q, k, state, log_gate=np.where(np.arange(CHUNK) == 0, RESET, 0.0)[:, None])


@pytest.mark.slow
def test_a_token_of_zeros_does_not_make_a_state_look_coarse():
  q, k, v = tokens(None)
  k[0] = v[0] = 0
  assert not is_left_faint(q, k, left_by(q, k, v, 1.0)[0])


def test_a_head_that_hears_its_own_chunk_need_not_hear_the_state():
  q, k, v = tokens(0.01)
  like_queries = k.copy()
  like_queries[-CHUNK] = 8 * q[-CHUNK]  # the last chunk begins with it
  (found, squares), _ = read_by_chunk(q, like_queries, v)
  squares = squares.at[..., :-1].set(0)  # as if no other chunk asked
  assert not is_faint(q, like_queries, found, squares)
  assert is_faint(q, k, found, squares)


def test_a_later_key_tells_a_head_nothing():
  q, k, v = tokens(0.01)
  k[-1] = 8 * q[-1]
  (found, squares), wrong = read_by_chunk(q, k, v)
  assert wrong > faint.AUDIBLE
  assert is_faint(q, k, found, squares.at[..., :-1].set(0))  # as if no other chunk asked


@pytest.mark.parametrize("asks", ["every fourth token", "a document across two chunks", "the last real tokens"])
def test_a_head_is_faint_if_some_of_its_queries_would_hear_nothing(asks):
  (q, k, v), (others, _, _), time = tokens(0.01), tokens(None), np.arange(TIME)
  if asks == "every fourth token":
    some = time % 4 == 0
  elif asks == "a document across two chunks":
    some = (time >= 1.5 * CHUNK) & (time < 2.5 * CHUNK)
  else:
    q[700:], some = 0, time >= 600
  q[~some] = others[~some]
  found, wrong = read_by_chunk(q, k, v)
  assert wrong > faint.AUDIBLE
  assert is_faint(q, k, *found)


def test_who_asks_for_nothing_is_not_faint():
  q, k, v = tokens(0.01)
  (found, squares), _ = read_by_chunk(q, k, v)
  assert is_faint(q, k, found, squares)
  erased = Found(*(jnp.zeros_like(x) for x in found))
  with jax.debug_nans(True):
    assert not is_faint(q, k, erased, squares, log_gate=-1000.0)
    assert not is_faint(0 * q, k, erased, squares)
  # Values that are all but the same: what is left of a state is less than their rounding.
  alike = found._replace(numerator=1e-4 * found.numerator)
  assert not is_faint(q, k, alike, 1e-8 * squares, centre_size=1e3)


def test_normalisers_that_are_drowned_and_sums_that_are_no_numbers_leave_a_head_faint():
  q, k, v = tokens(0.01)
  (found, squares), _ = read_by_chunk(q, k, v)
  assert is_faint(q, k, found._replace(normaliser=-found.normaliser), squares)
  late = found.numerator.at[:, 3 * CHUNK :].set(jnp.inf)
  assert is_faint(q, k, found._replace(numerator=late), squares.at[..., 3].set(jnp.nan))


@pytest.mark.parametrize("interpret", WHERE)
@pytest.mark.parametrize(("d", "dv", "dtype"), [(64, 128, jnp.float32), (128, 64, jnp.bfloat16)])
@pytest.mark.usefixtures("no_races_if_interpreted")
def test_what_queries_gather_inside_their_chunks(d, dv, dtype, interpret):
  random, chunk, (B, T, H, G) = np.random.default_rng(0), 320, (1, 640, 2, 2)
  q, k = (np.float16(random.normal(size=(B, T, n, d))) for n in (H * G, H))
  scale = np.float32(np.exp2(random.integers(-3, 4, (B, H, T))))
  log_gate = np.cumsum(-random.exponential(0.02, (B, H, 2, chunk)), axis=-1).reshape(B, H, T).astype(np.float32)
  numerator = jnp.asarray(random.normal(size=(B, T, H * G, dv)), dtype)
  places = np.array([0, 256, 320, 512])
  found = heard(*map(jnp.asarray, (q, k, scale, log_gate, numerator)), places, chunk, interpret=interpret)
  q, k, numerator = (np.moveaxis(np.asarray(x, np.float64), 1, 2) for x in (q, k, numerator))
  k, log_gate = (np.repeat(x, G, axis=1) for x in (k * scale[..., None], np.float64(log_gate)))
  inside = np.tri(T, dtype=bool) & (np.arange(T)[:, None] // chunk == np.arange(T) // chunk)
  between = np.where(inside, log_gate[..., None] - log_gate[..., None, :], -np.inf)
  near = np.sum(np.square(q @ np.swapaxes(k, -1, -2)) * np.exp(between), axis=-1)
  rows = (places[:, None] + np.arange(ROWS)).ravel()
  for one, other in zip(found, (near, np.sum(q**2, axis=-1), np.sum(numerator**2, axis=-1)), strict=True):
    np.testing.assert_allclose(one, other[..., rows], rtol=1e-4)


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize(("count", "chunk"), [(2, 64), (2, 4096), (3, 256), (9, 1024), (64, 1024), (1000, 1024)])
def test_heads_are_judged_all_along_but_for_a_first_chunk_that_finds_nothing(count, chunk, first):
  chunks, places = faint.some_places(count, chunk, first)
  windows = (chunks * chunk + places) // ROWS
  assert np.all(places % ROWS == 0)
  assert np.all(places < chunk)
  before, others = first * chunk // ROWS, (count - first) * chunk // ROWS
  ends = before + np.arange(len(windows) + 1) * others // len(windows)  # of nearly equal spans, with one in each
  assert len(windows) == min(8, others)
  assert np.all((ends[:-1] <= windows) & (windows < ends[1:]))


@pytest.mark.parametrize("gates", ["none", "weak", "resets"])
def test_heads_that_are_read_without_states_read_all_that_they_can_see(gates):
  random, tiles = np.random.default_rng(0), 12
  end = np.cumsum(-random.uniform(0, 40, (2, 3, tiles)) * (gates != "none"), axis=-1)
  if gates == "resets":
    end -= 128 * np.cumsum(random.uniform(size=end.shape) < 0.2, axis=-1)
  inside = np.broadcast_to(np.arange(tiles) // 4 * 4, end.shape).astype(np.int32)
  heads = jnp.asarray([[True, False, True], [False, False, True]])
  had_state = jnp.asarray([[1, 1, 0], [1, 0, 1]], jnp.int32)
  seen = visible.Visible(jnp.asarray(inside), None, had_state)
  found = visible.without_states(seen, Total(jnp.float32(end), jnp.zeros_like(end, jnp.float32)), heads)
  np.testing.assert_array_equal(found.has_state, [[0, 1, 0], [1, 0, 0]])
  assert np.all(found.first[..., ::2] <= found.first[..., 1::2])  # a block of two tiles begins where its first does
  before = np.pad(end[..., :-1], ((0, 0), (0, 0), (1, 0)))
  for b, h, n in np.ndindex(*end.shape):
    seen_by = [m for m in range(n) if before[b, h, n] - end[b, h, m] > INVISIBLE / LOG2E] + [n]
    expected = seen_by[0] if heads[b, h] and had_state[b, h] else inside[b, h, n]
    assert found.first[b, h, n] == expected
    assert found.last[b, h, n] == max(m for m in range(tiles) if found.first[b, h, m] <= n)


def values(means, seed=0):
  """A head's, with a mean for each chunk."""
  x = np.random.default_rng(seed).normal(size=(CHUNKS, CHUNK, WIDTH)) + np.reshape(means, (CHUNKS, 1, -1))
  return jnp.asarray(x.reshape(1, TIME, 1, WIDTH), jnp.bfloat16)


def centre_of(v):
  return np.asarray(centre(v)[0, 0], np.float64)


def test_states_are_about_the_mean_of_values():
  means = np.linspace(-3, 3, WIDTH)
  found = centre_of(values([means] * CHUNKS))
  assert np.linalg.norm(found - means) < 0.06 * np.linalg.norm(means)
  assert np.all(found[np.abs(means) < 0.1] == 0)  # of 256 values that might be chance


@pytest.mark.parametrize("mean", [0.3, 1.0, 5.0])
def test_values_less_their_mean_are_not_all_rounded_the_same_way(mean):
  v = values([mean] * CHUNKS)
  c = centre(v)[:, None]
  wrong = np.asarray(v - c, np.float64) - (np.asarray(v, np.float64) - np.asarray(c, np.float64))
  assert np.max(np.abs(np.mean(wrong, axis=1))) < 2e-4  # less the mean itself 7e-4, of means of 0.3 and 1


@pytest.mark.parametrize(
  "means", [[0] * 4, [8, 8, 0, 8], [0, 0, 0, 1e6], [1e-3, 1e3, 1e3, 1e3], [1, -1, 1, -1]], ids=str
)
def test_states_are_about_0_if_values_of_some_chunk_are_not_about_the_mean(means):
  np.testing.assert_array_equal(centre_of(values([[m] for m in means])), 0)


def test_a_coordinate_is_not_hurt_by_what_others_are():
  v = values([[100.0, 0.0, *[8.0] * (WIDTH - 2)]] * CHUNKS).at[:, : 2 * CHUNK, :, 1].multiply(1e-3)
  v = v.at[:, 2 * CHUNK :, :, 1].add(8.0)  # of later tokens
  found = centre_of(v)
  assert found[1] == 0
  assert found[0] > 90


def test_a_document_of_small_values_is_not_hurt_by_others():
  v = values([8.0] * CHUNKS)
  np.testing.assert_array_less(7, centre_of(v))
  np.testing.assert_array_equal(centre_of(v.at[:, 128:384].add(-8).at[:, 128:384].multiply(1e-3)), 0)
  np.testing.assert_array_equal(centre_of(v.at[:, ::2].multiply(1e-3).at[:, 1::2].multiply(1e3)) > 1e4, False)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 3e38])
def test_values_that_are_no_numbers_do_not_make_others_none(bad):
  found = centre_of(values([1.0] * 4).at[0, 600:700, 0, 3].set(bad))
  assert np.all(np.isfinite(found))
  assert found[3] == 0
  assert found[4] > 0.5


def test_padding_does_not_count_but_values_of_0_do():
  v = values([2.0] * CHUNKS)
  np.testing.assert_array_less(1.5, centre_of(v.at[:, 600:].set(0)))
  rarely = v.at[0, np.arange(TIME) % 20 > 0, 0, 1:].set(0)
  np.testing.assert_array_equal(centre_of(rarely)[1:], 0)
