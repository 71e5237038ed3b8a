// Writes the programs' manual pages and completions under a folder, laid out as under PREFIX/share. Run by the build:
//   mmrec-write-documents FOLDER
#include <array>
#include <filesystem>

#include "apps/bench/options.h"
#include "apps/common/cli.h"
#include "apps/common/document_options.h"
#include "apps/common/output.h"
#include "apps/generate/options.h"
#include "apps/ppl/options.h"
#include "mmrec/version.h"

namespace mmrec::apps {
namespace {

void write_file(const std::filesystem::path& path, std::string_view text) {
  std::filesystem::create_directories(path.parent_path());
  Output out(path.string());
  out.write(text);
  out.commit();
}

int write_documents(int argc, char** argv) {
  if (argc != 2) throw UsageError("expected a folder");
  const std::filesystem::path share = argv[1];
  const std::array<DocumentedProgram, 3> programs = {
      DocumentedProgram{"mmrec-generate", "continue a prompt with an MM-Rec model", "[DIR]", generate_option_table(),
                        generate_help(true)},
      DocumentedProgram{"mmrec-ppl",
                        "perplexity of documents under an MM-Rec model",
                        "[DIR] FILE...",
                        ppl_option_table(),
                        ppl_help(true),
                        {{"merge", merge_option_table(), merge_help()}}},
      DocumentedProgram{"mmrec-bench", "measure an MM-Rec model against what the machine can do", "",
                        bench_option_table(), bench_help(true)},
  };
  for (const DocumentedProgram& program : programs) {
    const std::string name(program.name);
    write_file(share / "man/man1" / (name + ".1"), manual_page(program, version()));
    write_file(share / "bash-completion/completions" / name, bash_completion(program));
    write_file(share / "zsh/site-functions" / ("_" + name), zsh_completion(program));
    write_file(share / "fish/vendor_completions.d" / (name + ".fish"), fish_completion(program));
  }
  return kOk;
}

}  // namespace
}  // namespace mmrec::apps

int main(int argc, char** argv) {
  return mmrec::apps::run_program("mmrec-write-documents", [&] { return mmrec::apps::write_documents(argc, argv); });
}
