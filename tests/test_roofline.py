"""What benchmarks/kernels.py reads from a compiled program, and counts."""

import math

import pytest
from jax.profiler import ProfileData

from benchmarks.kernels import Launched, Shape, launched, products, traffic


def call(place, name, operands, shapes):
  """A kernel as XLA writes it, whose results are of 16 bytes."""
  return (
    f"  %mpmd_map.1 = (bf16[2,3]{{1,0}}, f32[]) custom-call({operands}), "
    f'custom_call_target="mosaic_gpu_v2", operand_layout_constraints={{{shapes}}}, api_version=API_VERSION_TYPED_FFI, '
    f'metadata={{op_name="{place}/{name}/mpmd_map"}}'
  )


PROGRAM = "\n".join(
  [
    call("jit(f)", "copies", "%a.1, /*index=5*/%b", "f16[1,65]{1,0}, s32[2]{0}"),
    call("jit(f)/transpose(jvp())", "copies", "%a.1", "f16[1,65]{1,0}"),
    call("jit(f)/cond/branch_0_fun", "attention_forward", "%c", "pred[7]{0}"),
    call("jit(f)/cond/branch_1_fun", "attention_forward", "%c", "pred[8]{0}"),
    call("jit(f)/cond/branch_1_fun", "gram", "%c, %c, %d", "pred[8]{0}, pred[8]{0}, pred[1]{0}"),  # one is given twice
    call("jit(f)/cond/branch_1_fun/checkpoint", "reach", "%c", "pred[8]{0}"),
  ]
)
NAMES = {"copies", "attention_forward", "gram", "reach"}


def test_arrays_are_counted_once_a_kernel_where_it_reads_all_of_them():
  assert traffic(PROGRAM, NAMES) == {"copies": 2 * (16 + 130) + 8, "attention_forward": 24, "gram": 25, "reach": 0}


def test_of_a_conditional_the_branch_counts_whose_kernels_were_launched():
  assert traffic(PROGRAM, NAMES - {"gram"}) == {"copies": 2 * (16 + 130) + 8, "attention_forward": 23}


@pytest.mark.parametrize("head_dim", [64, 128])
def test_states_that_are_read_have_a_product_for_each_two_coordinates_at_least(head_dim):
  found = products(Shape(1, head_dim, 1024), chunked=True, gradients=False)
  least, most = (2 * head_dim * pairs for pairs in (math.comb(head_dim + 1, 2), head_dim**2))
  assert least < found["state_read"] - 4 * head_dim**2 < most


def test_all_keys_before_a_query_and_its_own_tile_are_multiplied():
  found = products(Shape(512, 64, 512), chunked=False, gradients=True)
  tiles = 1 + 2 + 3 + 4
  assert found == {"attention_forward": 2 * 2 * tiles * 128**2 * 64, "attention_backward": 5 * 2 * tiles * 128**2 * 64}


PROFILE = """
planes {
  name: "/device:GPU:0"
  event_metadata { key: 1 value { id: 1 name: "gram_mosaic_gpu_kernel" } }
  event_metadata { key: 2 value { id: 2 name: "loop_add_fusion" } }
  event_metadata { key: 3 value { id: 3 name: "input_reduce_fusion" } }
  lines {
    name: "Stream #14(Compute)"
    events { metadata_id: 1 duration_ps: 3000000 }
    events { metadata_id: 1 duration_ps: 5000000 }
    events { metadata_id: 2 duration_ps: 1000000 }
    events { metadata_id: 3 duration_ps: 2000000 }
  }
  lines { name: "XLA Ops" events { metadata_id: 1 duration_ps: 8000000 } }
}
planes {
  name: "/host:CPU"
  event_metadata { key: 1 value { id: 1 name: "gram" } }
  lines { name: "Stream" events { metadata_id: 1 } }
}
"""


def test_launches_of_a_profile_are_told_apart_by_kernel_and_counted_for_one_run(tmp_path):
  (tmp_path / "plugins").mkdir()
  (tmp_path / "plugins/host.xplane.pb").write_bytes(ProfileData.text_proto_to_serialized_xspace(PROFILE))
  assert launched(tmp_path, 2) == {"gram": Launched(1, 4.0), "XLA's": Launched(1, 1.5)}
