"""The quality that quantizations keep, as published by llama.cpp."""

from __future__ import annotations

from edgespec.models.hub.names import normal

KEEPS_QUALITY = 0.05
"""Of perplexity: a quantization that loses less is said to keep the quality."""

_PERPLEXITY = 6.2316  # of Llama 3 8B in 16 bits, on Wikitext
# Added to that by each quantization: from llama.cpp's tools/quantize/quantize.cpp and, for the IQ types (made
# with an importance matrix), from its tools/perplexity/README.md.
_ADDED = {
    **{"IQ1_S": 54.46, "IQ1_M": 19.26, "IQ2_XXS": 7.86, "IQ2_XS": 4.53, "IQ2_S": 3.42, "IQ2_M": 2.37},
    **{"Q2_K_S": 3.18, "Q2_K": 3.52, "IQ3_XXS": 1.227, "IQ3_XS": 0.931, "IQ3_S": 0.734, "IQ3_M": 0.667},
    **{"Q3_K_S": 1.632, "Q3_K_M": 0.657, "Q3_K_L": 0.556, "IQ4_XS": 0.228, "IQ4_NL": 0.224},
    **{"Q4_0": 0.469, "Q4_1": 0.451, "Q4_K_S": 0.269, "Q4_K_M": 0.1754, "Q5_0": 0.1316, "Q5_1": 0.1062},
    **{"Q5_K_S": 0.1049, "Q5_K_M": 0.0569, "Q6_K": 0.0217, "Q8_0": 0.0026, "F16": 0.0015, "BF16": 0.0},
    "F32": 0.0,
}


def perplexity_loss(label: str) -> float | None:
    """The published share by which a quantization raises perplexity; None if none is published.

    Variants with more bits in some tensors, such as Q4_K_L and Q4_K_XL, count as what they were made from.
    """
    name = normal(label)
    base = name.removesuffix("_XL").removesuffix("_L")
    known = next((n for n in (name, f"{base}_M", base, f"{base.removesuffix('_K')}_0") if n in _ADDED), None)
    return None if known is None else _ADDED[known] / _PERPLEXITY
