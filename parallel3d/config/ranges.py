"""`in_range` limits a number in a recipe, as in `scale: Annotated[float, in_range(gt=0, le=1)] =
0.5`."""

from annotated_types import Interval

in_range = Interval
