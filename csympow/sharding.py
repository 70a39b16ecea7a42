"""One mesh, and one table of what it splits.

The mesh has four axes: `data`, `fsdp`, `tensor`, `context`. Arrays are described by logical axes; `Rules` maps each to
the mesh axes that split it, and is the only place that does. XLA finds the collectives for everything but attention,
which runs in `shard_map`: rows and heads are independent there, and shards of the sequence exchange their states
(`csympow.context`).
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import lax
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Integer

import csympow
from csympow import context, softmax
from csympow.lookup import look_up

AXES = ("data", "fsdp", "tensor", "context")

type MeshAxes = str | tuple[str, ...] | None


@dataclasses.dataclass(frozen=True)
class Rules:
  """The mesh axes that split each logical axis.

  Attributes:
    batch: rows of a batch.
    time: positions of a sequence.
    width: the residual stream, in activations.
    embed: the residual stream, in parameters: split there and gathered for use.
    heads: heads of the attention.
    head_dim: the width of a head.
    mlp: the width of the MLP.
    vocab: tokens, in the embedding and the logits.
    layers: the stacked layers, which a scan walks.
  """

  batch: MeshAxes = ("data", "fsdp")
  time: str = "context"
  width: MeshAxes = None
  embed: MeshAxes = "fsdp"
  heads: MeshAxes = "tensor"
  head_dim: MeshAxes = None
  mlp: MeshAxes = "tensor"
  vocab: MeshAxes = "tensor"
  layers: MeshAxes = None

  def spec(self, *logical: str | None) -> PartitionSpec:
    """How an array with these logical axes lies on the mesh; None names an axis that nothing splits."""
    return PartitionSpec(*(None if name is None else getattr(self, name) for name in logical))


# The logical axes of every parameter, by the end of its path; those of stacked layers have one more in front.
PARAMETERS = {
  "embedding/embedding": ("vocab", "embed"),
  "query/kernel": ("embed", "heads", "head_dim"),
  "key/kernel": ("embed", "heads", "head_dim"),
  "value/kernel": ("embed", "heads", "head_dim"),
  "out/kernel": ("heads", "head_dim", "embed"),
  "gamma/kernel": ("embed", "heads"),
  "beta/kernel": ("embed", "heads"),
  "up/kernel": ("embed", "mlp"),
  "down/kernel": ("mlp", "embed"),
  "scale": ("width",),
}


@dataclasses.dataclass(frozen=True)
class Layout:
  """A mesh and its rules: what a model needs to know to run on many devices."""

  mesh: Mesh
  rules: Rules = Rules()

  def sharding(self, *logical: str | None) -> NamedSharding:
    """Of an array with these logical axes."""
    return NamedSharding(self.mesh, self.rules.spec(*logical))

  def constrain(self, x: Array, *logical: str | None) -> Array:
    """The array, laid out by its logical axes."""
    return jax.lax.with_sharding_constraint(x, self.sharding(*logical))

  @property
  def context_shards(self) -> int:
    """Into how many parts a sequence is split."""
    return self.mesh.shape[self.rules.time]

  def parameter_shardings(self, tree: Any) -> Any:
    """The shardings of a tree of parameters, or of an optimizer's state that mirrors it; scalars are everywhere."""

    def find(path: Any, leaf: Any) -> NamedSharding:
      name = jax.tree_util.keystr(path, simple=True, separator="/")
      if not leaf.ndim:
        return NamedSharding(self.mesh, PartitionSpec())
      for end, logical in PARAMETERS.items():
        if name == end or name.endswith("/" + end):
          return self.sharding(*("layers",) * (leaf.ndim - len(logical)), *logical)
      raise KeyError(f"csympow.sharding.PARAMETERS has no row for {name}")

    return jax.tree_util.tree_map_with_path(find, tree)

  def look_up(self, table: Float[Array, "V d"], tokens: Integer[Array, "B T"]) -> Float[Array, "B T d"]:
    """`csympow.lookup.look_up` of tokens that lie on the mesh, each device adding up the gradients of its own."""
    lie = self.rules.spec("batch", "time")
    axes = tuple(axis for axis in self.mesh.axis_names if axis in jax.tree.leaves(tuple(lie)))

    def find(table: Array, tokens: Array) -> Array:
      return look_up(lax.pcast(table, axes, to="varying"), tokens)

    mapped = jax.shard_map(find, mesh=self.mesh, in_specs=(PartitionSpec(), lie), out_specs=PartitionSpec(*lie, None))
    found: Array = mapped(table, tokens)
    return found

  def attention(
    self,
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B T H d"],
    v: Float[Array, "B T H dv"],
    *,
    log_gate: Float[Array, "B T H"] | None,
    beta: Float[Array, "B T H"] | None,
    rates: Float[Array, "r"],
    segment_ids: Integer[Array, "B T"] | None,
    **how: Any,
  ) -> Float[Array, "B T Hq dv"]:
    """`csympow.attention` of arrays that lie on the mesh."""
    attend = (
      functools.partial(context.attention, axis=self.rules.time) if self.context_shards > 1 else csympow.attention
    )
    return self._mapped(
      lambda q, k, v, log_gate, beta, rates, segment_ids: attend(
        q, k, v, log_gate=log_gate, beta=beta, rates=rates, segment_ids=segment_ids, **how
      )
    )(q, k, v, log_gate, beta, rates, segment_ids)

  def softmax(
    self,
    q: Float[Array, "B T Hq d"],
    k: Float[Array, "B T H d"],
    v: Float[Array, "B T H d"],
    rates: Float[Array, "r"],
    segment_ids: Integer[Array, "B T"] | None,
    implementation: str | None,
  ) -> Float[Array, "B T Hq d"]:
    """`csympow.softmax.attention` of arrays that lie on the mesh."""

    def attend(q: Array, k: Array, v: Array, log_gate: None, beta: None, rates: Array, segment_ids: Array) -> Array:
      if self.context_shards > 1:
        return context.softmax(
          q, k, v, axis=self.rules.time, rates=rates, segment_ids=segment_ids, implementation=implementation
        )
      return softmax.attention(q, k, v, rates, segment_ids, implementation)

    return self._mapped(attend)(q, k, v, None, None, rates, segment_ids)

  def _mapped(self, attend: Any) -> Any:
    """A function of q, k, v, log_gate, beta, rates and segment ids, run by each device on its part of them."""
    spec = self.rules.spec
    heads, gate = spec("batch", "time", "heads", "head_dim"), spec("batch", "time", "heads")
    inputs = (heads, heads, heads, gate, gate, PartitionSpec(), spec("batch", "time"))
    return jax.shard_map(attend, mesh=self.mesh, in_specs=inputs, out_specs=heads)


def make_mesh(sizes: dict[str, int], devices: list[Any] | None = None) -> Mesh:
  """The mesh of these sizes, over all devices unless some are given."""
  shape = tuple(sizes[name] for name in AXES)
  # Not jax.make_mesh: it refuses an axis that is no product of the torus's own, such as 8 on v5p's 4 x 4 x 4.
  laid_out = mesh_utils.create_device_mesh(shape, devices, allow_split_physical_axes=True)
  return Mesh(laid_out, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def mesh_sizes(data: int, fsdp: int, tensor: int, context: int, devices: int) -> dict[str, int]:
  """The sizes by name, `data = -1` replaced by what the others leave of the devices; raises where they do not fit."""
  others = fsdp * tensor * context
  product = f"fsdp x tensor x context = {fsdp} x {tensor} x {context}"
  if data == -1:
    if devices % others:
      raise ValueError(f"mesh: {product} = {others} must divide the number of devices, {devices}")
    data = devices // others
  if data * others != devices:
    raise ValueError(f"mesh: data x {product} = {data * others} must be the number of devices, {devices}")
  return dict(zip(AXES, (data, fsdp, tensor, context), strict=True))
