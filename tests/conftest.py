"""What holds for every test."""

from hypothesis import settings

# Shared machines stall for seconds, so the time of one example says nothing; pytest's timeout catches what hangs.
settings.register_profile("kvferry", deadline=None, print_blob=True)
settings.load_profile("kvferry")
