"""Products with a model's matrices: one protocol, and the forms in which a matrix is held in
memory."""

from engine.models.linear.choose import form_of, rounding_of
from engine.models.linear.matrix import Matrix, StoredExpert, joined
from engine.models.linear.product import Product
from engine.models.linear.protocol import ExpertNet, Form, Linear, held

__all__ = [
    "ExpertNet",
    "Form",
    "Linear",
    "Matrix",
    "Product",
    "StoredExpert",
    "form_of",
    "held",
    "joined",
    "rounding_of",
]
