"""The book's colours: the same in every figure, calculator and diagram, and safe for colour-blind readers."""

PREFILL = "#D55E00"
DECODE = "#0072B2"
CACHE = "#009E73"
IDLE = "#B8BDC4"
ACCENT = "#CC79A7"
INK = "#1F2933"

# Surfaces that carry white text need contrast 4.5: use these shades behind words.
PREFILL_SURFACE = "#B84F00"
DECODE_SURFACE = "#0072B2"
CACHE_SURFACE = "#00785A"
