from ..quick_compile import quick_compile  # noqa: F401  for every test of this folder
