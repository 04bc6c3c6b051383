"""From a module to a graph: export (`export`), clean up (`canonical`), turn to plain data (`convert`)."""

from autoshard.capture.captured import Captured
from autoshard.capture.export import capture
from autoshard.capture.footprints import with_footprints

__all__ = ["Captured", "capture", "with_footprints"]
