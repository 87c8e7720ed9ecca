"""Programs to look at and to measure. A package of its own, as some libraries install one of this name beside them."""
