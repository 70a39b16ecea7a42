"""The schema of a training run: one frozen dataclass per concern, each refusing what means nothing by itself.

A config file is Python with a `get_config()` that returns a `Config`; the command line overrides single fields
(`csympow.overrides`). What only makes sense together, or needs the devices or the data, is checked in `check` and by
those who read the data, before anything compiles.
"""

import dataclasses
import math
import typing
from typing import Any, Literal

from csympow.model import ModelConfig


class ConfigError(ValueError):
  """What a user asked for cannot be done; the message is one line for that user."""


def _require(condition: bool, message: str) -> None:
  if not condition:
    raise ConfigError(message)


def _require_at_least(config: Any, least: int, *names: str) -> None:
  for name in names:
    value = getattr(config, name)
    fits = value is None or (math.isfinite(value) and value >= least)
    _require(fits, f"{_prefix(config)}{name} must be at least {least}, got {value}")


def _prefix(config: Any) -> str:
  return {"Config": ""}.get(type(config).__name__, type(config).__name__.removesuffix("Config").lower() + ".")


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Where tokens come from.

  Attributes:
    train: a zarr array of documents x tokens (a path, `gs://` or `s3://`), or "embedded": the sources of the Python
      standard library as bytes.
    heldout: the same for evaluation; None: no evaluation. "embedded" are the packages held out from training.
    tokenizer: "bytes", or a Hugging Face `tokenizers` JSON file; only text samples need it. None: what the dataset's
      own `dataset.json` names, or else ids instead of text.
    windows: "all" cuts every document into windows of the training context; "first" takes the first window of each
      document only, which is how the paper counts (400,000 documents whatever the context).
    shuffle: whether windows come in random order (a function of the seed) or as stored; a store whose rows are already
      in random order, such as LongCrawl64, reads faster as stored.
    join: whether consecutive documents may be joined, without a boundary, to fill a context longer than a document.
    cache_mb: memory for decoded chunks of the store.
    threads: threads that read windows.
    prefetch: batches read ahead.
  """

  train: str = "embedded"
  heldout: str | None = None
  tokenizer: str | None = None
  windows: Literal["all", "first"] = "all"
  shuffle: bool = True
  join: bool = False
  cache_mb: int = 256
  threads: int = 4
  prefetch: int = 4

  def __post_init__(self) -> None:
    _require_at_least(self, 0, "cache_mb")
    _require_at_least(self, 1, "threads", "prefetch")
    _require(bool(self.train), 'data.train must be a path or "embedded", got an empty string')
    _require(
      self.heldout != "embedded" or self.train == "embedded",
      f"data.heldout=embedded is no held-out part of data.train={self.train}: give its own, or none",
    )


@dataclasses.dataclass(frozen=True)
class OptimizerConfig:
  """The update, by optax; the default is the paper's: Adam at a constant 6e-4.

  Attributes:
    name: "adam", or "adamw" for decoupled weight decay of the matrices.
    learning_rate: the peak.
    schedule: "constant"; "cosine" from the peak to `final_share` of it; "wsd": constant, then a linear decay to
      `final_share` over the last `decay_steps`. All after a linear warm-up.
    warmup_steps: steps from 0 to the peak.
    decay_steps: steps of the decay of "wsd".
    final_share: the last learning rate over the peak.
    b1: decay of Adam's first moment.
    b2: decay of Adam's second moment.
    eps: Adam's epsilon.
    weight_decay: of "adamw".
    clip_norm: the largest global norm of a gradient; None: no clipping.
    z_loss: weight of the squared log normaliser of the logits, which keeps them from drifting.
  """

  name: Literal["adam", "adamw"] = "adam"
  learning_rate: float = 6e-4
  schedule: Literal["constant", "cosine", "wsd"] = "constant"
  warmup_steps: int = 0
  decay_steps: int = 0
  final_share: float = 0.0
  b1: float = 0.9
  b2: float = 0.999
  eps: float = 1e-8
  weight_decay: float = 0.0
  clip_norm: float | None = None
  z_loss: float = 0.0

  def __post_init__(self) -> None:
    _require_at_least(
      self, 0, "learning_rate", "warmup_steps", "decay_steps", "final_share", "b1", "b2", "weight_decay", "z_loss"
    )
    _require(self.learning_rate > 0, f"optimizer.learning_rate must be positive, got {self.learning_rate}")
    _require(self.b1 < 1 and self.b2 < 1, f"optimizer.b1 and b2 must be below 1, got {self.b1} and {self.b2}")
    _require(self.eps > 0, f"optimizer.eps must be positive, got {self.eps}")
    _require(
      self.clip_norm is None or self.clip_norm > 0, f"optimizer.clip_norm must be positive, got {self.clip_norm}"
    )
    _require(
      self.name == "adamw" or not self.weight_decay, "optimizer.weight_decay needs optimizer.name=adamw: adam has none"
    )
    _require(
      (self.schedule == "wsd") == bool(self.decay_steps),
      f"optimizer.decay_steps is the length of schedule=wsd's decay, got {self.decay_steps} with {self.schedule}",
    )


@dataclasses.dataclass(frozen=True)
class MeshConfig:
  """How many devices along each axis of the mesh; `csympow.sharding` says what each axis splits.

  Attributes:
    data: copies of the model, each with its own rows of the batch. -1: all devices that the other axes leave.
    fsdp: as data, with the parameters split as well, and gathered when they are used.
    tensor: heads, the MLP's width and the vocabulary.
    context: the sequence.
  """

  data: int = -1
  fsdp: int = 1
  tensor: int = 1
  context: int = 1

  def __post_init__(self) -> None:
    _require_at_least(self, 1, "fsdp", "tensor", "context")
    _require(self.data == -1 or self.data >= 1, f"mesh.data must be positive, or -1 for the rest, got {self.data}")


@dataclasses.dataclass(frozen=True)
class CheckpointConfig:
  """When to save, and what to keep.

  Attributes:
    every: steps between checkpoints.
    keep: how many of the newest to keep, at least 2, so that a damaged one has one before it.
    keep_every: keep also each whose step is a multiple of this; None: none.
  """

  every: int = 500
  keep: int = 3
  keep_every: int | None = None

  def __post_init__(self) -> None:
    _require_at_least(self, 1, "every", "keep_every")
    _require_at_least(self, 2, "keep")


@dataclasses.dataclass(frozen=True)
class GuardConfig:
  """What to do about steps that would spoil the run.

  Attributes:
    skip_limit: how many bad steps in a row are skipped before the run stops; 0 stops at the first.
    spike: a loss above this many times its running mean is bad too; None: only what is not finite.
    spike_warmup: steps before the running mean is trusted.
  """

  skip_limit: int = 0
  spike: float | None = None
  spike_warmup: int = 100

  def __post_init__(self) -> None:
    _require_at_least(self, 0, "skip_limit", "spike_warmup")
    _require(self.spike is None or self.spike > 1, f"guard.spike must be above 1, got {self.spike}")


@dataclasses.dataclass(frozen=True)
class LogConfig:
  """What a run tells, and how often, in steps; 0 is never.

  Attributes:
    every: a line of metrics.
    gates: statistics of gates and rotations.
    heldout: the held-out loss at the training context.
    heldout_batches: batches of that evaluation.
    sample: a text sample.
    sample_tokens: its length.
    prompt: what it continues; empty: a held-out document's beginning.
    tensorboard: whether to write TensorBoard events as well.
    context_curve: the longest context of the evaluation of held-out loss against context that ends the run; 0: none.
    context_documents: held-out documents of that evaluation, at most.
  """

  every: int = 10
  gates: int = 100
  heldout: int = 500
  heldout_batches: int = 8
  sample: int = 0
  sample_tokens: int = 200
  prompt: str = ""
  tensorboard: bool = True
  context_curve: int = 0
  context_documents: int = 16

  def __post_init__(self) -> None:
    _require_at_least(self, 1, "every", "heldout_batches", "sample_tokens", "context_documents")
    _require_at_least(self, 0, "gates", "heldout", "sample", "context_curve")


@dataclasses.dataclass(frozen=True)
class Config:
  """A whole run.

  Attributes:
    model: its shape.
    data: what it reads.
    optimizer: how it learns.
    mesh: where it runs.
    checkpoint: when it saves.
    guard: when it stops by itself.
    log: what it tells.
    context: tokens of a sequence.
    batch_tokens: tokens of a step, over all rows and devices.
    accumulation: parts that a step's batch is cut into, one after the other; their gradients are added up.
    steps: updates in all.
    seed: of the parameters and of the order of the data.
    deterministic: whether operations whose order of addition varies from run to run are avoided (on GPUs), so that a
      resumed run is the same run to the last bit.
  """

  model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
  data: DataConfig = dataclasses.field(default_factory=DataConfig)
  optimizer: OptimizerConfig = dataclasses.field(default_factory=OptimizerConfig)
  mesh: MeshConfig = dataclasses.field(default_factory=MeshConfig)
  checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
  guard: GuardConfig = dataclasses.field(default_factory=GuardConfig)
  log: LogConfig = dataclasses.field(default_factory=LogConfig)
  context: int = 1024
  batch_tokens: int = 524_288
  accumulation: int = 1
  steps: int = 1000
  seed: int = 0
  deterministic: bool = True

  def __post_init__(self) -> None:
    _require_at_least(self, 1, "context", "batch_tokens", "accumulation", "steps")
    _require(self.model.vocab_size < 2**31, f"model.vocab_size must be below 2^31, got {self.model.vocab_size}")
    _require(self.steps < 2**31, f"steps must be below 2^31, got {self.steps}")
    _require(self.batch_tokens < 2**40, f"batch_tokens must be below 2^40, got {self.batch_tokens}")
    _require(0 <= self.seed < 2**31, f"seed must be from 0 to 2^31 - 1, got {self.seed}")
    _require(
      self.batch_tokens % self.context == 0,
      f"batch_tokens must be a multiple of context={self.context}, got {self.batch_tokens}",
    )
    _require(
      self.rows % self.accumulation == 0,
      f"accumulation must divide the {self.rows} rows of a batch (batch_tokens / context), got {self.accumulation}",
    )
    ramps = self.optimizer.warmup_steps + self.optimizer.decay_steps
    _require(ramps <= self.steps, f"optimizer.warmup_steps + decay_steps must fit in steps={self.steps}, got {ramps}")

  @property
  def rows(self) -> int:
    """Rows of a step's batch."""
    return self.batch_tokens // self.context

  def check_platform(self, platform: str) -> None:
    """Raises a ConfigError for what a program compiled for this platform would fail at when it runs."""
    both = self.model.unroll and self.deterministic
    _require(
      not (both and self.model.variant == "softmax" and platform in ("gpu", "cuda")),
      "model.unroll=true with model.variant=softmax: XLA cannot run cuDNN's deterministic backward pass unrolled; "
      "set model.unroll=false, or in a new workdir deterministic=false",
    )

  def check_mesh(self, sizes: dict[str, int]) -> None:
    """Raises a ConfigError unless the batch, the context and the model divide over a mesh of these sizes."""
    spread = sizes["data"] * sizes["fsdp"]
    model = self.model
    heads = model.num_kv_heads or model.num_heads
    for what, size, by, over in (
      (f"rows of a step ({self.rows}) / accumulation", self.rows // self.accumulation, "data x fsdp", spread),
      ("context", self.context, "context", sizes["context"]),
      ("model.num_heads", model.num_heads, "tensor", sizes["tensor"]),
      ("model.num_kv_heads", heads, "tensor", sizes["tensor"]),
      ("model.d_model", model.d_model, "fsdp", sizes["fsdp"]),
      ("model.mlp_ratio x d_model", model.mlp_ratio * model.d_model, "tensor", sizes["tensor"]),
      ("the padded vocabulary", model.padded_vocab_size, "tensor", sizes["tensor"]),
    ):
      _require(size % over == 0, f"{what} = {size} must be a multiple of the mesh's {by} = {over}")
    local = self.context // sizes["context"]
    chunk = model.chunk_size
    _require(
      chunk is None or chunk <= local, f"model.chunk_size must be at most a device's {local} tokens, got {chunk}"
    )


# Fields that may change between the parts of one run: they say where and how fast it runs, what it tells, and what it
# does about bad steps.
FREE = (
  *("mesh.", "log.", "checkpoint.", "guard.", "accumulation"),
  *("data.cache_mb", "data.threads", "data.prefetch", "data.tokenizer"),
  *("model.remat", "model.unroll", "model.form", "model.chunk_size", "model.implementation"),
)


def to_dict(config: Config) -> dict[str, Any]:
  """The config as nested dictionaries, for JSON."""
  return dataclasses.asdict(config)


def from_dict(tree: Any) -> Config:
  """The config that `to_dict` made these dictionaries of; raises a ConfigError naming a field that is no such field."""
  return _built(Config, tree, "")


def _built[C](schema: type[C], tree: Any, prefix: str) -> C:
  _require(isinstance(tree, dict), f"{prefix.removesuffix('.') or 'the config'} must be a group of fields")
  hints = typing.get_type_hints(schema)
  fields: dict[str, Any] = {}
  for name, value in tree.items():
    _require(name in hints, f"no field {prefix}{name} in the config of this version")
    if dataclasses.is_dataclass(hints[name]):
      fields[name] = _built(hints[name], value, f"{prefix}{name}.")
    else:
      _require(_fits(hints[name], value), f"{prefix}{name} cannot be {value!r:.80}")
      fields[name] = value
  try:
    return schema(**fields)
  except ConfigError:
    raise
  except (TypeError, ValueError) as error:
    raise ConfigError(f"{prefix}{error}") from error


def _fits(hint: Any, value: Any) -> bool:
  """Whether a value that JSON gave is of a field's type."""
  options = typing.get_args(hint)
  if typing.get_origin(hint) is Literal:
    return value in options
  if options:
    return any(_fits(option, value) for option in options)
  if hint is float:
    return isinstance(value, int | float) and not isinstance(value, bool)
  return isinstance(value, hint) and (hint is bool or not isinstance(value, bool))


def differences(ours: dict[str, Any], theirs: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
  """The fields, by dotted name, whose values differ in two configs of `to_dict` and that may not.

  `steps` may change where the learning rate does not depend on it. Paths may too: what the files hold is compared by
  its fingerprint instead.
  """
  a, b = (_flat(config) for config in (ours, theirs))
  free = (*FREE, "data.train", "data.heldout", *(["steps"] if a.get("optimizer.schedule") == "constant" else []))
  names = [name for name in {**a, **b} if not name.startswith(free)]
  return {name: (a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)}


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
  flat: dict[str, Any] = {}
  for name, value in tree.items():
    flat |= _flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
  return flat
