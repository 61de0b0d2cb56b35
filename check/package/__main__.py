"""python -m check_training, the same as check-training."""

from check_training import main

if __name__ == "__main__":
    main()
