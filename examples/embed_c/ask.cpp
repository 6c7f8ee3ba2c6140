// ask.cpp: ask.c in C++17, through gemrun.hpp.
#include <gemrun.hpp>

#include <iostream>

int main(int argc, char **argv)
{
    if (argc < 2) {
        std::cerr << "usage: ask MODEL.gembin [PROMPT]\n";
        return 2;
    }
    try {
        gemrun_config config = gemrun_config_default();
        config.allow_foreign_board = 1;
        gemrun::Context model(argv[1], config);
        const int passed = model.run_tests();
        if (argc > 2) {
            gemrun::Request request = model.request();
            request.settings.max_tokens = 32;
            std::cout << model.generate(argv[2], request) << "\n";
        }
        std::cout << "ask: " << passed << " test vectors passed\n";
    } catch (const gemrun::Error &error) {
        std::cerr << "ask: " << error.what() << "\n";
        return 1;
    }
}
