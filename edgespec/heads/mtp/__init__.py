"""Layers for multi-token prediction (MTP), in their model's file or in one of their own."""
