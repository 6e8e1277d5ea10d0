"""What holds for all tests."""

import signal

# A shell that starts us in the background has SIGINT ignored, and everything we start would inherit that: tests that interrupt a
# command would wait for ever.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
