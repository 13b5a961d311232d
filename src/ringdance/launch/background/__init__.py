"""Jobs in the background: start, show, attach to and stop them."""
