"""Prints how many times longer forward and backward of the chunked form take at 65,536 tokens than at 16,384.

python benchmarks/linearity.py
"""

import time

import jax
import jax.numpy as jnp

import csympow


def best_time(length: int, head_dim: int = 16, repeats: int = 3) -> float:
  """The shortest of a few runs, in seconds."""
  keys = jax.random.split(jax.random.key(0), 6)
  q, k, v, dy = (jax.random.normal(key, (1, length, 1, head_dim)) for key in keys[:4])
  log_gate = jax.nn.log_sigmoid(jax.random.normal(keys[4], (1, length, 1)) + 3)
  beta = 1 + jnp.tanh(jax.random.normal(keys[5], (1, length, 1)))
  rates = csympow.rotary_rates(head_dim, 65_536)

  @jax.jit
  def gradients(*arrays):
    attend = lambda q, k, v, log_gate, beta: csympow.attention(q, k, v, 2, log_gate, beta, rates, form="chunked")  # noqa: E731
    return jax.vjp(attend, *arrays)[1](dy)

  times = []
  for _ in range(repeats + 1):
    start = time.perf_counter()
    jax.block_until_ready(gradients(q, k, v, log_gate, beta))
    times.append(time.perf_counter() - start)
  return min(times[1:])


if __name__ == "__main__":
  print(best_time(65_536) / best_time(16_384))
