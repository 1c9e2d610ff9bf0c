"""The results of a batch: wanted, written, resumed and merged."""
