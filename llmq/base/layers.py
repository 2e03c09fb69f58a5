"""Sets of layers as options write them."""


def layer_set(text: str, num_layers: int) -> frozenset[int]:
    """The layers that "all" or numbers and ranges such as 0-11,20 name.

    ValueError if there are not so many.
    """
    if text == "all":
        return frozenset(range(num_layers))
    layers: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if int(last or first) >= num_layers:  # before a set of that size is made
            raise ValueError(f"{text} names layers that a model of {num_layers} does not have")
        layers.update(range(int(first), int(last or first) + 1))
    return frozenset(layers)
