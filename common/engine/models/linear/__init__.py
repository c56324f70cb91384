"""Products with a model's matrices: one protocol, and the forms in which a matrix can be held."""

from common.engine.models.linear.choose import form_of
from common.engine.models.linear.protocol import Form, Linear

__all__ = ["Form", "Linear", "form_of"]
