"""deltarefit: a policy's new weights, from a training cluster into every rollout server, exactly and fast.

Only the bits that changed travel; every receiver ends with the very bits that a full reload would have left. This package
places nothing itself: the serving engine's own loader says where an element belongs. It is not a checkpoint store and not a
collective library.
"""
