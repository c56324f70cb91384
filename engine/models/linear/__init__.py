"""Products with a model's matrices: one protocol, and the forms of a matrix in memory."""

from engine.models.linear.choose import form_of, rounding_of, stays_stored
from engine.models.linear.matrix import (
    INT8,
    NO_CUTS,
    Matrix,
    MatrixPart,
    Ranges,
    StoredExpert,
    common_format,
    joined,
    kept,
    scaled,
)
from engine.models.linear.product import GatheredLinear, Product, gathered, own_outputs
from engine.models.linear.protocol import ExpertNet, Form, Linear, SlottedExperts

__all__ = [
    "INT8",
    "NO_CUTS",
    "ExpertNet",
    "Form",
    "GatheredLinear",
    "Linear",
    "Matrix",
    "MatrixPart",
    "Product",
    "Ranges",
    "SlottedExperts",
    "StoredExpert",
    "common_format",
    "form_of",
    "gathered",
    "joined",
    "kept",
    "own_outputs",
    "rounding_of",
    "scaled",
    "stays_stored",
]
