"""Times the training step: tokens/s, share of the chip's arithmetic (MFU) and memory, conformal beside softmax.

    python benchmarks/training.py                   # the quickstart's step, on a CPU in a minute or two
    python benchmarks/training.py --model=124m      # GPT-2's 124M at 1k, 4k, 16k and 64k tokens of context, on one GPU

Tokens are random. Each line gives the median over the repeats and the 20th and 80th percentile of a step's time, tokens
a second, conformal's tokens a second over softmax's, MFU by the formula of `csympow.train.flops`, and the compiler's
count of memory.
"""

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np

from csympow import overrides
from csympow.config import Config
from csympow.data.loader import Batch
from csympow.model import ModelConfig
from csympow.train import banner, flops
from csympow.train.metrics import size
from csympow.train.step import Program

LINE = "{:>9} {:>10} {:>11} {:>26} {:>12} {:>8} {:>7} {:>10}"


def runs(model: str, variants: list[str], contexts: list[int], tokens: int):
  """The configs to time."""
  for context in contexts:
    for variant in variants:
      if model == "quickstart":
        changes = {"model.variant": variant, "context": str(context), "batch_tokens": str(tokens)}
        yield overrides.load(str(pathlib.Path(__file__).parents[1] / "configs" / "quickstart.py"), changes)
      else:
        model = ModelConfig(variant=variant, unroll=True)
        yield Config(model=model, context=context, batch_tokens=tokens, deterministic=False)


def time_step(config: Config, repeats: int):
  """The seconds of each repeat, and the compiler's count of memory."""
  program = Program(config, None)
  key = jax.random.key(0)
  shape = (config.rows, config.context)
  tokens, targets = jax.random.randint(key, (2, *shape), 0, config.model.vocab_size)
  batch, flags = Batch(tokens, targets, None), jnp.zeros(1, jnp.int32)
  state = jax.jit(program.init)()
  step = jax.jit(program.step, donate_argnums=0).lower(state, batch, flags).compile()
  seconds = []
  for n in range(repeats + 2):
    began = time.perf_counter()
    state, metrics = step(state, batch, flags)
    assert np.isfinite(float(metrics.loss))
    if n >= 2:
      seconds.append(time.perf_counter() - began)
  return seconds, banner.memory(step)[0], flops.per_token(config, state.parameters, jax.default_backend())


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
  parser.add_argument("--model", choices=["quickstart", "124m"], default="quickstart")
  parser.add_argument("--variants", default="softmax,conformal")
  parser.add_argument("--contexts", help="comma-separated; by default 256, or 1024,4096,16384,65536")
  parser.add_argument("--tokens", type=int, help="of a step; by default 4,096, or 65,536")
  parser.add_argument("--repeats", type=int, default=10)
  parser.add_argument("--out", metavar="FILE.json")
  options = parser.parse_args()
  small = options.model == "quickstart"
  contexts = [int(text) for text in (options.contexts or ("256" if small else "1024,4096,16384,65536")).split(",")]
  tokens = options.tokens or (4096 if small else 65_536)
  device = jax.devices()[0]
  print(f"{options.model}, {tokens:,} tokens a step, on one {device.device_kind}, jax {jax.__version__}")
  print(LINE.format("context", "variant", "form", "step, ms (p20-p80)", "tokens/s", "ratio", "MFU", "memory"))
  records, softmax = [], {}
  for config in runs(options.model, options.variants.split(","), contexts, tokens):
    try:
      seconds, memory, per_token = time_step(config, options.repeats)
    except jax.errors.JaxRuntimeError as error:
      print(f"{config.context:>9} {config.model.variant:>10}   {str(error).splitlines()[0][:90]}")
      continue
    middle, low, high = statistics.median(seconds), *np.quantile(seconds, (0.2, 0.8))
    speed = tokens / middle
    softmax |= {config.context: speed} if config.model.variant == "softmax" else {}
    ratio = speed / softmax[config.context] if config.context in softmax else float("nan")
    used = flops.utilisation(speed, per_token, 1, device.device_kind)
    whole = dict.fromkeys(("data", "fsdp", "tensor", "context"), 1)
    explained = flops.explanation(config, whole, jax.default_backend())
    form = "softmax" if explained is None else explained.form
    spread = f"{middle * 1e3:.1f} ({low * 1e3:.1f}-{high * 1e3:.1f})"
    share = "-" if used is None else f"{used:.1%}"
    row = (
      f"{config.context:,}",
      config.model.variant,
      form,
      spread,
      f"{speed:,.0f}",
      f"{ratio:.2f}",
      share,
      size(memory),
    )
    print(LINE.format(*row), flush=True)
    records.append(
      {"context": config.context, "variant": config.model.variant, "form": form, "step_s": middle, "p20_s": low}
      | {"p80_s": high, "tokens_per_s": speed, "mfu": used, "memory_bytes": memory}
    )
  if options.out:
    header = {"device": device.device_kind, "jax": jax.__version__, "model": options.model, "tokens": tokens}
    pathlib.Path(options.out).write_text(json.dumps(header | {"runs": records}, indent=1))


if __name__ == "__main__":
  main()
