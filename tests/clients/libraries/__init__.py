"""Client libraries by their own calls: each script runs in an environment that has the library."""
