"""Triton functions. Importing a module of this package needs Triton, so launchers import them where they launch."""
