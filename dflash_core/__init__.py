"""DFlash itself: chats to tokens, taps of the target, drafter, loss, training, acceptance. Torch only."""
