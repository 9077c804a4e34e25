"""DFlash itself: chats to tokens, target taps, drafter, loss, training mathematics, acceptance. Torch only."""
