"""Abuse an engine at random for a while, and compare its next answers with an untouched engine's.

python -m tests.abuse --minutes 10
"""
