"""The headers of draft heads, and whether a head fits its target."""
