"""Conformal symmetric-power attention: a transformer with a state of constant size.

Causal attention with weights (q . k) ** p instead of exp(q . k) has three equal forms: quadratic, chunked with linear
cost, and recurrent with constant memory. Gates erase from its state, data-dependent rotations choose where to store:

    phase_i = phase_{i-1} + beta_i theta
    S_i = gamma_i S_{i-1} + phi(R(phase_i) k_i) v_i^T
    Z_i = gamma_i Z_{i-1} + phi(R(phase_i) k_i)
    y_i = S_i^T phi(R(phase_i) q_i) / (Z_i . phi(R(phase_i) q_i))

Notation, here and in the code:

    B, T      batch, time                          p         the power, even
    Hq, H     query heads, key heads               phi       the symmetric power: phi(x) . phi(y) = (x . y) ** p
    g         queries per key head, Hq / H         D         features, C(d + p - 1, p)
    d, dv     head dim of keys, of values          gamma     gates in [0, 1]; log_gate their logarithm, G its sum so far
    r         d / 2, pairs of coordinates          b_ij      exp(G_i - G_j), the discount from token j to token i
    theta     rates of rotation, radians           B_ij      b_ij (q'_i . k'_j) ** p, the attention weight
    beta      speeds of rotation, per token        q', k'    rotated q and k
    S, Z      the state: sums of phi(k) v^T, phi(k)

Layout is [batch, time, heads, dim] everywhere.
"""

from csympow.cost import Explanation
from csympow.features import symmetric_power
from csympow.op import attention, explain, init_state, prefill, step
from csympow.rotation import rotary_rates
from csympow.state import State

__all__ = [
  "Explanation",
  "State",
  "attention",
  "explain",
  "init_state",
  "prefill",
  "rotary_rates",
  "step",
  "symmetric_power",
]
