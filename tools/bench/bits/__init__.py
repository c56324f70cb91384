"""Checks batch invariance in whole systems: responses have the same bits in all circumstances."""
