"""Code that the families of draft heads share."""
