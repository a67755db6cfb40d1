"""What holds for all tests."""

import signal

# Where the tests are started in the background of a shell, Ctrl-C is ignored, and so it would be by all they start.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
