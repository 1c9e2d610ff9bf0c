"""Modules that packages of all layers share: options, units, progress and hints on installation."""
