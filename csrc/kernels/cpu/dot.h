// Products of int8 codes, for the units compiled once per ISA. SLIMRT_DOT names the header that has, for one
// instruction set,
//   half_to_float(bits); store(Half*, Vec)
//   Codes                  64 codes of 8 bits: weights (unsigned) or activations (signed)
//   load_codes(p)          64 bytes; load_halves(p, q): 32 and 32; load_twice(p): 32, and the same again
//   load_nibbles(p, q)     low nibbles of 16 bytes, their high ones, and the same of q
//   fields(c, s, t, mask)  (c >> s) & mask in the first half, (c >> t) & mask in the second; above(c, d): c + 16 d
//   Sums, dot<wide>(s, w, x)  sums of products, in the order of the codes. Weights are below 64 or, when wide, come
//                          from wide(c), c signed, which adds wide_offset
//   start_halves(p), start_quarters(p)  2 (4) integers, each in one of the sums of its half (quarter), others 0
//   Acc, to_acc(Sums)      a float for each of the sums, with fma, sum
//   Scales                 16 floats, with *, store. Of activations: load_two(p), load_eight(p, q), load_each_twice(p);
//                          of weights: two_scales(p, q), 16-bit floats; eight_scales(p), the first 16 bytes of Q4_K
//                          and Q5_K: 8 scales and 8 minima; sixteen_scales(p, d): d times 16 of int8
//   spread_halves(s, j)    s[2j] for the first half of the sums, s[2j + 1] for the second; spread_quarters: from 4j
//   add_last_eight(acc, s) s[8...15] added to any of acc's
//   dot_rows               rows to multiply side by side
// and, for panels (see linear_panel.h)
//   PanelCodes, PanelSums, dot<wide>  `lanes` quadruples of codes and their sums; to_vec
//   load_panel(p); splat_four(p): 4 codes in all lanes; start_all(p): an integer in all
//   store_transposed(rows, to, stride)  quadruple q of Codes rows[r], r < lanes, to to + q * stride + 4 r
//   panel_vectors, panel_tokens  the register tile
#pragma once

#include "kernels/cpu/simd.h"

#include SLIMRT_DOT
