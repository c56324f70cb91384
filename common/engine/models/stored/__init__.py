"""How checkpoints store matrices: as they are, or in fewer bits by one of some formats.

Each format has a file, and here is the table of them. What comes out of all is a Matrix.
"""

from collections.abc import Callable, Mapping

from common.engine.models.fields import Fields
from common.engine.models.stored.awq import awq
from common.engine.models.stored.compressed import compressed_tensors
from common.engine.models.stored.fp8 import fbgemm_fp8, fp8
from common.engine.models.stored.gptq import gptq
from common.engine.models.stored.mxfp4 import mxfp4
from common.engine.models.stored.plain import PLAIN
from common.engine.models.stored.protocol import Scheme
from common.errors import ConfigError

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
    """What a model's `quantization_config` says.

    Raises:
        ConfigError: a method or a variant of it that is not supported, by name.
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
