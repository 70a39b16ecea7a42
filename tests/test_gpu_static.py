"""What benchmarks/gpu_static.py reads from what ptxas and nvdisasm print."""

import pytest

from benchmarks.gpu_static import Kernel, inner_loops, kernels, overwritten, read

REPORT = """ptxas info    : (C7512) Potential Performance Loss: wgmma.mma_async instructions are serialized due to ...
ptxas info    : Function properties for attention_forward_mosaic_gpu_kernel
    152 bytes stack frame, 140 bytes spill stores, 152 bytes spill loads
ptxas info    : Used 96 registers, used 16 barriers, 152 bytes cumulative stack size, 1 bytes smem
"""
PROGRAM = """
   -:-:-:Y:01        /*0000*/                   S2R R7, SR_TID.X
.L_x_1:
   -:-:-:Y:01        /*0010*/                   FMUL R1, R1, R1
.L_x_2:
   -:-:-:Y:01        /*0020*/                   SYNCS.PHASECHK.TRANS64.TRYWAIT P1, [UR10], R7
   -:-:-:Y:01        /*0030*/              @!P1 BRA `(.L_x_4)
.L_x_3:
   -:-:-:Y:01        /*0040*/                   HGMMA.64x64x16.F32.BF16 R24, gdesc[UR8], R24, gsb0
   -:-:-:Y:05        /*0050*/               @P1 BRA `(.L_x_2)
   -:-:-:Y:05        /*0060*/               @P0 BRA `(.L_x_1)
   -:-:-:Y:05        /*0070*/                   EXIT
.L_x_4:
   -:-:-:Y:05        /*0080*/                   BRA `(.L_x_3)
.L_x_5:
   -:-:-:Y:05        /*0090*/                   BRA `(.L_x_5)
"""


def test_registers_spills_products_in_a_row_and_innermost_loops_with_products_are_read():
  assert read(REPORT, PROGRAM) == Kernel(registers=96, spilled=140, in_a_row=True, loops=(4,), overwritten=0)
  assert not read(REPORT.split("\n", 1)[1], PROGRAM).in_a_row


def test_a_program_may_have_no_loop_with_products():
  assert inner_loops(PROGRAM.replace("HGMMA", "HMUL2")) == ()


IN_FLIGHT = """
        /*0000*/                   HGMMA.64x64x16.F32.BF16 R24, R8, gdesc[UR8], R24, gsb0
        /*0010*/                   HGMMA.64x64x16.F32.BF16 R56, gdesc[UR8], R56, gsb0
        /*0020*/                   WARPGROUP.DEPBAR.LE gsb0, 0x{waits_for}
        /*0030*/              @!P1 {instruction}
"""


@pytest.mark.parametrize(
  "instruction",
  [
    "FMUL R11, R1, R1",
    "LDS.128 R8, [R2]",
    "LDSM.16.M88.4 R5, [R2]",
    "LDSM.16.MT88.2 R6, [R2]",
    "ISETP.GE.AND P0, PT, R9, R1, PT",
    "MOV R7, R8",
  ],
)
def test_what_is_written_to_a_left_operand_under_way_is_counted(instruction):
  writes = instruction.startswith(("FMUL", "LDS.", "LDSM.16.M88"))
  assert overwritten(IN_FLIGHT.format(waits_for=2, instruction=instruction)) == writes
  assert overwritten(IN_FLIGHT.format(waits_for=1, instruction=instruction)) == 0  # the first has come


def test_kernels_come_in_their_order_and_those_of_a_name_that_are_alike_once(tmp_path):
  for name, spilled in (("reach_10", 0), ("copies_9", 0), ("copies_2", 4), ("copies_3", 4)):
    (tmp_path / f"{name}.ptxas").write_text(REPORT.replace("140 bytes spill", f"{spilled} bytes spill"))
    (tmp_path / f"{name}.sass_ctrl").write_text(PROGRAM)
  assert {name: kernel.spilled for name, kernel in kernels(tmp_path).items()} == {
    "copies": 4,
    "copies 9": 0,
    "reach": 0,
  }
