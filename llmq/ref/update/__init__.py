"""Update rules of parameters, and the norm of all gradients: references."""
