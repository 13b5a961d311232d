"""Jobs in the background: start, show, follow and stop them."""
