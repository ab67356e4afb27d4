"""A module of a rank whose imports take long."""

import time

time.sleep(1000)
