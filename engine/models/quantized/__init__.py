"""Storage schemes of matrices in checkpoints: unquantised, or quantised in one of several formats.

Each format has a file. The table of schemes is here. Every scheme returns a Matrix.
"""

from collections.abc import Callable, Mapping

from common.errors import ConfigError
from engine.models.fields import Fields
from engine.models.quantized.experts import mxfp4
from engine.models.quantized.fp8 import fbgemm_fp8, fp8
from engine.models.quantized.packed import awq, compressed_tensors, gptq
from engine.models.quantized.protocol import PLAIN, Scheme

# By quant_method.
SCHEMES: Mapping[str, Callable[[Fields], Scheme]] = {
    "fp8": fp8,
    "fbgemm_fp8": fbgemm_fp8,
    "compressed-tensors": compressed_tensors,
    "awq": awq,
    "gptq": gptq,
    "mxfp4": mxfp4,
}


def scheme_of(config: Fields) -> Scheme:
    """Return the scheme that a model's `quantization_config` selects.

    Raises:
        ConfigError: the method or its variant is not supported. The message names it.
    """
    if "quantization_config" not in config:
        return PLAIN
    quantisation = config.nested("quantization_config")
    method = quantisation.text("quant_method")
    if method not in SCHEMES:
        raise ConfigError(
            f"checkpoints quantised by {method!r} are not supported; {', '.join(SCHEMES)} are"
        )
    return SCHEMES[method](quantisation)
