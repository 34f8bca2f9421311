"""python -m reproduce.measures"""

from reproduce.measures.command import main

if __name__ == "__main__":
    main()
