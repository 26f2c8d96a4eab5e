"""No test fails because the machine is busy: examples of Hypothesis have no deadline."""

from hypothesis import settings

settings.register_profile("deltarefit", deadline=None)
settings.load_profile("deltarefit")
