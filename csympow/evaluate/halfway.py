"""A long pass half-way: the cache it has reached and what it has found so far, kept now and then."""

import time
from collections.abc import Callable

import jax
import numpy as np
from jax.typing import ArrayLike

from csympow.evaluate.kept import Kept
from csympow.nn import Cache

_SECONDS = 30.0  # between two times
_SHARE = 0.05  # of the time that keeping may take
_BYTES = 2**30  # above which nothing is kept: the disk is the user's


class HalfWay:
  """Where a pass stands.

  Args:
    kept: what it is kept among.
    key: a hash of everything that the pass is made from.
    found: the arrays that its results are gathered in, changed in place by whoever gathers them and by `resume`.
    resumed: called with the tokens that were read already, if there are any.
    to_the_end: whether the end of the pass is kept as well: there is more to do before its results are.
  """

  def __init__(
    self,
    kept: Kept,
    key: str,
    found: dict[str, np.ndarray],
    resumed: Callable[[int], None],
    *,
    to_the_end: bool = False,
  ) -> None:
    self._kept, self._key, self._found, self._resumed, self.to_the_end = kept, key, found, resumed, to_the_end
    self._due = time.monotonic() + _SECONDS

  @property
  def due(self) -> bool:
    """Whether it is time to keep it."""
    return time.monotonic() >= self._due

  def keep(self, position: int, cache: Cache) -> None:
    """Keeps the pass, `position` tokens of which are read; `found` must be up to date."""
    began = time.monotonic()
    # As bytes: NumPy's files know no bfloat16.
    arrays = {f"cache{i}": _bytes(x) for i, x in enumerate(jax.tree.leaves(cache))} | self._found
    if sum(x.nbytes for x in arrays.values()) <= _BYTES:
      self._kept.put_arrays(self._key, arrays | {"position": np.asarray(position)})
    now = time.monotonic()
    self._due = now + max(_SECONDS, (now - began) / _SHARE)

  def resume(self, empty: Cache) -> tuple[int, Cache]:
    """How many tokens were read when it was kept, and the cache then; `found` is set to what had been found."""
    stored = self._kept.arrays(self._key)
    leaves, tree = jax.tree.flatten(empty)
    wanted = {f"cache{i}": _bytes(x) for i, x in enumerate(leaves)} | self._found | {"position": np.asarray(0)}
    if stored is None or _shapes(stored) != _shapes(wanted):
      return 0, empty
    for name, array in self._found.items():
      array[...] = stored[name]
    read = [stored[f"cache{i}"].view(x.dtype).reshape(x.shape) for i, x in enumerate(leaves)]
    placed = [jax.device_put(x, like.sharding) for x, like in zip(read, leaves, strict=True)]
    self._resumed(int(stored["position"]))
    return int(stored["position"]), jax.tree.unflatten(tree, placed)

  def end(self) -> None:
    """Forgets it: the pass is done, and its results are kept."""
    self._kept.drop_arrays(self._key)


def _bytes(x: ArrayLike) -> np.ndarray:
  return np.ascontiguousarray(np.asarray(x)).reshape(-1).view(np.uint8)


def _shapes(arrays: dict[str, np.ndarray]) -> dict[str, tuple[tuple[int, ...], str]]:
  return {name: (array.shape, array.dtype.str) for name, array in arrays.items()}
