"""The `.gembin` format in Python: written and read from csrc/FORMAT.md.

    spec       records, enums, limits           records    the rules that records have to meet
    sizes      every size formula               tokens     the rules of TOKN and TMPL
    writer     ArtifactWriter, fill_tests       reader     read_artifact -> Artifact
    assemble   records -> header and parts      manifest   the msgpack manifest
    codes      Code, FormatError                memmap     the listing beside an artifact
    sign       keys and the signature block    units      an artifact again, with other units
Needs nothing beyond the standard library and msgpack, so that a device can check what it is given.
"""
