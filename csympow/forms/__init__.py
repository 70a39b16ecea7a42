"""The three formulations of one function, on prepared inputs: rotated, padded, and with every reset written as a gate.

`attention` is quadratic, `chunked` linear, `recurrent` the definition. All arithmetic but the operands of matrix
products is float32.
"""
