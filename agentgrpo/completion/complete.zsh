#compdef agentgrpo
# zsh completion of agentgrpo, written by `agentgrpo completion zsh`.
# <words>
_agentgrpo() {
  local command=$words[2] word=$PREFIX name rest
  local -a known=($_agentgrpo_commands) place=() found=() open=()
  if ((CURRENT > 2)); then
    ((${_agentgrpo_commands[(Ie)$command]})) && [[ $command != -* ]] || return 1
    local -a values=(${(P)${:-_agentgrpo_value_$command}})
    ((${values[(Ie)$words[CURRENT - 1]]})) && { _files; return }
    known=(${(P)${:-_agentgrpo_words_$command}}) place=(${(P)${:-_agentgrpo_place_$command}})
  fi
  for name in ${(M)known:#${(b)word}*}; do
    [[ $name == -* && $word != -* || $name == *= && $name == $word ]] && continue
    rest=${name#$word}
    if [[ $name == *=* && $rest == *[.=]?* ]]; then # a part of a key at a time
      rest=${rest%%[.=]*}
      name=$word$rest${name[${#word} + ${#rest} + 1]}
    fi
    if [[ $name == *[.=] ]]; then open+=($name); else found+=($name); fi
  done
  compadd -- ${(u)found}
  compadd -S '' -- ${(u)open}
  [[ $word == -* ]] && return
  if [[ $place == runs ]]; then
    _files -/
  elif [[ $place == config ]] && ((CURRENT == 3)); then
    _files -g '*.toml'
  elif ((!${#found} && !${#open})); then
    compset -P '*='
    _files
  fi
}
if [[ $funcstack[1] == _agentgrpo ]]; then _agentgrpo "$@"; else compdef _agentgrpo agentgrpo; fi
