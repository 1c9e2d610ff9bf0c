"""Models that are made, not downloaded: larger ones, mixtures, and headers without weights."""
