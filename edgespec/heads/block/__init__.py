"""DFlash and DFlash2: heads that draft a block of tokens in one pass."""
