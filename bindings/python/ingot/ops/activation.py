from .. import _plain
from .._declare import declare
from .._op import ACTIVATION_NAMES, activation_number

declare(
    "activation(Tensor x, str name) -> Tensor",
    "The activation `name` of every element of x.",
    lambda x, name: _plain.activation(x, name),
    details="name: one of ingot.functional.ACTIVATIONS.",
    native=lambda name: (activation_number("activation", name),),
    options=tuple({"name": name} for name in ACTIVATION_NAMES),
    jumps=tuple(i for i, name in enumerate(ACTIVATION_NAMES) if name in ("relu", "leaky_relu")),
)
