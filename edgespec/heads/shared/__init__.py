"""What the families of heads share."""
