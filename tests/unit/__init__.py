"""Property tests have no time limit: a busy machine is no failure."""

from hypothesis import HealthCheck, settings

settings.register_profile("unit", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("unit")
