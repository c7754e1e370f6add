/* sources 662b989aeb225c35d3ffe3ff31b9afb4d7eae75d49dedd0cb4c4e422a1d25974 */
/* with preact (MIT) and htm (Apache-2.0), whose licences stand in bundle/LICENSES.txt */
var S,ft,_r,K,He,we,mt,ve,_t,De,Ie,xr,de=Symbol.for("pv"),ke={},Me=[],gr=/^m(i|n|o|s|text|space)$/,Fe=Array.isArray,Be=Me.slice,Q=Object.assign;function Z(t){t&&t.parentNode&&t.remove()}function We(t,e,r){var n,a,o,i={},s=arguments.length;for(o in e)o=="key"?n=e[o]:o=="ref"&&typeof t!="function"?a=e[o]:i[o]=e[o];return s>2&&(i.children=s>3?Be.call(arguments,2):r),ce(t,i,n,a,null)}function ce(t,e,r,n,a){var o={type:t,props:e,key:r,ref:n,__k:null,__:null,__b:0,__e:null,__c:null,constructor:de,__v:a||++ft,__i:-1,__u:0};return!a&&S.vnode&&S.vnode(o),o}function Ae(t){return t.children}function pe(t,e){this.props=t,this.context=e,this.__g=0}function J(t,e){if(e==null)return t.__&&J(t.__,t.__i+1);for(var r;e<t.__k.length;e++)if((r=t.__k[e])&&r.__e)return r.__e;return typeof t.type!="function"||t.props.__P?null:J(t)}function br(t){var e,r=t.__v,n=r.__e,a=[],o=[],i=t.__P;i&&((e=Q({constructor:de},r)).__v=r.__v+1,S.vnode&&S.vnode(e),Ve(i,e,r,t.__n,i.namespaceURI,32&r.__u?[n]:null,a,n||J(r),32&r.__u,o),e.__v=r.__v,e.__.__k[e.__i]=e,yt(a,e,o),r.__=r.__e=null,e.__e!=n&&xt(e))}function xt(t){if((t=t.__)&&t.__c&&!t.props.__P)return t.__e=null,t.__k.some(function(e){return e&&(t.__e=e.__e)}),xt(t)}function ut(t){(8&t.__g||(t.__g|=8,K.push(t),we++))&&He==S.debounceRendering||((He=S.debounceRendering)||queueMicrotask)(gt)}function gt(){try{for(var t,e=1;K.length;)K.length>e&&K.sort(mt),t=K.shift(),e=K.length,8&t.__g&&br(t)}finally{(we=K.length)&&(He||queueMicrotask)(gt)}}function bt(t,e,r,n,a,o,i,s,l,h,c){var u,f,p,d,x,_,m=n.__k||Me,g=e.length;for(l=$r(r,e,m,l,g),u=0;u<g;u++)(p=r.__k[u])!=null&&(f=~p.__i&&m[p.__i]||ke,p.__i=u,_=Ve(t,p,f,a,o,i,s,l,h,c),d=p.__e,(f.ref!=p.ref||8&f.__u)&&(f.ref&&Ge(f.ref,null,p,f),p.ref&&c.push(p.ref,p.__c||d,p)),x=x||d,4&p.__u?(l=$t(p,l,t,!f.__v),f.__e&&(f.__e=null)):typeof p.type=="function"&&_!==void 0?l=_:d&&(l=d.nextSibling),p.__u&=-21);return r.__e=x,l}function $r(t,e,r,n,a){var o,i,s,l,h,c,u,f,p,d=r.length,x=d,_=0,m=0,g=t.__k=Array(a);for(o=0;o<a;o++)(i=e[o])!=null&&typeof i!="boolean"&&typeof i!="function"?(typeof i!="object"||i.constructor===String?i=g[o]=ce(null,i):Fe(i)?i=g[o]=ce(Ae,{children:i}):i.constructor===de&&i.__b?i=g[o]=ce(i.type,i.props,i.key,i.ref,i.__v):g[o]=i,l=o+_,i.__=t,i.__b=t.__b+1,s=null,~(h=i.__i=vr(i,r,l,x))&&(x--,(s=r[h])&&(s.__u|=2)),s&&s.__v?(i.__u|=16,h==l-1?_--:h==l+1?_++:h!=l&&(h>l?_--:_++,m=1)):(~h||(a>d?_--:a<d&&_++),typeof i.type!="function"&&(i.__u|=4))):g[o]=null;if(m){for(c=[],u=[],o=0;o<a;o++)if((i=g[o])&&16&i.__u){for(_=0,f=c.length;_<f;)c[p=_+f>>1]<i.__i?_=p+1:f=p;c[_]=i.__i,u[o]=_+1}for(_=c.length;o--;)u[o]&&(u[o]==_?_--:g[o].__u|=4)}if(x)for(o=0;o<d;o++)!(s=r[o])||2&s.__u||(s.__e==n&&(n=J(s)),Ke(s,s));return n}function $t(t,e,r,n){var a,o,i,s;if(typeof t.type=="function"){if(t.props.__P)return e;if(a=t.__k)for(o=0;o<a.length;o++)a[o]&&(a[o].__=t,e=$t(a[o],e,r,!1));return e}for(e&&!e.parentNode&&(e=J(t))&&!e.parentNode&&(e=null),i=t.__e,s=e;s&&s.nodeType==8;)s=s.nextSibling;for(i!=s&&(!n&&r.moveBefore&&i.parentNode?r.moveBefore(i,e):r.insertBefore(i,e||null)),e=i;(e=e&&e.nextSibling)&&e.nodeType==8&&!e.data.startsWith("$s"););return e}function vr(t,e,r,n){var a,o=t.key,i=t.type,s=e[r],l=s&&!(2&s.__u);if(s===null&&o==null||l&&o==s.key&&i==s.type)return r;if(n>(l?1:0)){for(a=r-1;a>=0;a--)if((s=e[a])&&!(2&s.__u)&&o==s.key&&i==s.type)return a;for(a=r+1;a<e.length;a++)if((s=e[a])&&!(2&s.__u)&&o==s.key&&i==s.type)return a}return-1}function ht(t,e,r){r==null&&(r=""),e[0]=="-"?t.setProperty(e,r):t[e]=r}function $e(t,e,r,n,a){var o,i;if(e=="style")if(typeof r=="string")t.style.cssText=r;else{if(typeof n=="string"&&(t.style.cssText=n=""),n)for(e in n)r&&e in r||ht(t.style,e);if(r)for(e in r)n&&r[e]==n[e]||ht(t.style,e,r[e])}else if(e[0]=="o"&&e[1]=="n")typeof r!="function"&&(r=null),typeof n!="function"&&(n=null),(t.__e||(t.__e={}))[e]=r,r&&n||(i=Ie[e]||(Ie[e]=yr(e)),(t.__a||(t.__a={}))[e]=De,o=e!=(e=e.replace(_t,"$1")),(e=e.slice(2))[0]<"a"&&(e=e.toLowerCase()),r?t.addEventListener(e,i,o):t.removeEventListener(e,i,o));else{if(a=="http://www.w3.org/2000/svg")e=e.replace(/xlink(H|:h)/,"h").replace(/sName$/,"s");else if(e!="width"&&e!="height"&&e!="href"&&e!="list"&&e!="form"&&e!="tabIndex"&&e!="download"&&e!="rowSpan"&&e!="colSpan"&&e!="role"&&e!="popover"&&e in t)try{return void(t[e]=r??"")}catch{}if(typeof r=="function")return;r==null||r===!1&&e[4]!="-"?t.removeAttribute(e):t.setAttribute(e,e=="popover"&&r==1?"":r)}}function yr(t){return function(e){var r=this.__e;if(r){if(r=r[t],e[ve]==null)e[ve]=De++;else if(e[ve]<this.__a[t])return;return r(S.event?S.event(e):e)}}}function Ve(t,e,r,n,a,o,i,s,l,h){var c,u,f,p,d,x,_,m,g,v,y,w,k,C,M,I,q,L,R=e.type;if(e.constructor!==de)return null;128&r.__u&&(l=32&r.__u,c=r.__c.__z)&&(e.__u|=l,u=o=[],c.nodeType==8?s=ye(c,o):o.push(c),s=o[0]||s),(c=S.__b)&&c(e);e:if(typeof R=="function"){f=i.length;try{if(m=e.props,g=(c=R.prototype)&&c.render,v=(c=R.contextType)&&n[c.__c],y=c?v?v.props.value:c.__:n,(p=r.__c)?(e.__c=p,2&p.__g&&(p.__g|=1)):(g?e.__c=p=new R(m,y):(e.__c=p=new pe(m,y),p.constructor=R,p.render=kr),v&&v.sub(p),p.state||(p.state={}),p.__n=n,p.__g|=8,p.__h=[],p.__k=[]),g&&(p.__s||(p.__s=p.state),R.getDerivedStateFromProps&&(p.__s==p.state&&(p.__s=Q({},p.__s)),Q(p.__s,R.getDerivedStateFromProps(m,p.__s)))),d=p.props,x=p.state,p.__v=e,r.__c){if(m!==d&&g&&!R.getDerivedStateFromProps&&p.componentWillReceiveProps&&p.componentWillReceiveProps(m,y),e.__v==r.__v&&!(8&p.__g)||!(4&p.__g)&&p.shouldComponentUpdate&&p.shouldComponentUpdate(m,p.__s,y)===!1){e.__v!=r.__v&&(p.props=m,p.state=p.__s,p.__g&=-9),e.__e=r.__e,e.__k=r.__k,e.__k.some(function(b){b&&(b.__=e)}),Me.push.apply(p.__h,p.__k),p.__k=[],p.__h.length&&i.push(p),s=J(r);break e}p.componentWillUpdate&&p.componentWillUpdate(m,p.__s,y),g&&p.componentDidUpdate&&p.__h.push(function(){p.componentDidUpdate(d,x,_)})}else g&&!R.getDerivedStateFromProps&&p.componentWillMount&&p.componentWillMount(),g&&p.componentDidMount&&p.__h.push(p.componentDidMount);p.context=y,p.props=m,p.__P=t,p.__g&=-5,w=S.__r,k=g?25:0;do p.__g&=-9,w&&w(e),c=p.render(p.props,p.state=p.__s,p.context);while(8&p.__g&&++k<25);g&&(Me.push.apply(p.__h,p.__k),p.__k=[]),p.state=p.__s,p.getChildContext&&(n=Q({},n,p.getChildContext())),g&&r.__c&&p.getSnapshotBeforeUpdate&&(_=p.getSnapshotBeforeUpdate(d,x)),C=c&&c.type===Ae&&c.key==null?c.props.children:c,m.__P&&(c=s,a=(t=m.__P).namespaceURI,l=o=null,r.props&&r.props.__P!=t&&(r.__k.some(function(b){b&&Ke(b,b)}),r.__k=null),s=r.__k?J(r,0):null),s=bt(t,Fe(C)?C:[C],e,r,n,a,o,i,s,l,h),m.__P&&(e.__e=null,s=c),e.__u&=-161,u&&u.some(Z),p.__h.length&&i.push(p),1&p.__g&&(p.__g&=-4)}catch(b){if(i.length=f,e.__v=null,l||o)if(b&&b.then){if(e.__u|=128|l,o){for(~(q=o.indexOf(s||void 0))||(q=o.length);(L=o[q-1])&&L.nodeType==8;)q--;for(;q<o.length;q++)if(L=o[q])if(o[q]=null,M){if(L==I)break}else{if(L.nodeType!=8)break;L.data.startsWith("$s")&&(I=ye(M=L))}}if(!M){for(;s&&s.nodeType==8&&s.nextSibling;)s=s.nextSibling;M=s}(c=ye(M=e.__c.__z||(e.__c.__z=M)))?(e.__e=M,s=c):e.__e=s,s=s&&s.nextSibling}else o&&o.some(Z);else e.__e=r.__e;e.__k||(e.__k=r.__k||[]),b&&b.then||vt(e),S.__e(b,e,r)}}else s=e.__e=wr(r.__e,e,r,n,a,o,i,l,h,t);return(c=S.diffed)&&c(e),s}function ye(t,e){if(t&&t.nodeType==8&&t.data.startsWith("$s"))for(var r=1;t=t.nextSibling;){if(t.nodeType==8){if(t.data.startsWith("$s"))r++;else if(t.data.startsWith("/$s")&&!--r)return t}e&&e.push(t)}}function vt(t){t&&(t.__c&&(t.__c.__g|=4),t.__k&&t.__k.some(vt))}function yt(t,e,r){for(var n=0;n<r.length;)Ge(r[n++],r[n++],r[n++]);S.__c&&S.__c(e,t),t.some(function(a){try{t=a.__h,a.__h=[],t.some(function(o){o.call(a)})}catch(o){S.__e(o,a.__v)}})}function wr(t,e,r,n,a,o,i,s,l,h){var c,u,f,p,d,x,_,m,g=r.props||ke,v=e.props,y=e.type;if(y=="svg"?a="http://www.w3.org/2000/svg":y=="math"?a="http://www.w3.org/1998/Math/MathML":a||(a="http://www.w3.org/1999/xhtml"),o){for(c=0;c<o.length;c++)if((d=o[c])&&(y?d.localName==y:d.nodeType==3)){t=d,o[c]=null;break}}if(!t){if(m=h.ownerDocument||document,!y)return m.createTextNode(v);t=m.createElementNS(a,y,v.is?v:h),s&&(S.__m&&S.__m(e,o),s=!1),o=null}if(y){if(h=y=="template"&&t.content||t,o=y=="textarea"&&v.defaultValue!=null?null:o&&Be.call(h.childNodes),!s&&o)for(g={},c=0;c<t.attributes.length;c++)g[(d=t.attributes[c]).name]=d.value;for(c in g)d=g[c],c=="dangerouslySetInnerHTML"?f=d:c=="children"||c in v||c=="value"&&"defaultValue"in v||c=="checked"&&"defaultChecked"in v||$e(t,c,null,d,a);for(c in v)d=v[c],c=="children"?p=d:c=="dangerouslySetInnerHTML"?u=d:c=="value"?x=d:c=="checked"?_=d:s&&typeof d!="function"||g[c]===d||$e(t,c,d,g[c],a);u?(s||f&&(u.__html==f.__html||u.__html==t.innerHTML)||(t.innerHTML=u.__html),e.__k=[]):(f&&(t.textContent=""),(y=="foreignObject"||a=="http://www.w3.org/1998/Math/MathML"&&gr.test(y))&&(a="http://www.w3.org/1999/xhtml"),bt(h,Fe(p)?p:[p],e,r,n,a,o,i,o?o[0]:r.__k&&J(r,0),s,l),o&&o.some(Z)),s&&y!="textarea"||(c="value",y=="progress"&&x==null?t.removeAttribute(c):x==null||x===t[c]&&(y!="progress"||x)||$e(t,c,x,g[c],a),c="checked",_!=null&&_!=t[c]&&$e(t,c,_,g[c],a))}else g===v||s&&t.data==v||(t.data=v);return t}function Ge(t,e,r,n){try{typeof t=="function"?e?e.__x=t(e)||1:n&&(n=n.__c||n.__e)&&(e=n.__x)&&(n.__x=null,typeof e=="function"?e():t(null)):t.current=e}catch(a){S.__e(a,r)}}function Ke(t,e,r){var n,a,o,i;if(S.unmount&&S.unmount(t),!(n=t.ref)||n.current&&n.current!=t.__e||Ge(n,null,e,t),n=t.__c){if(n.componentWillUnmount)try{n.componentWillUnmount()}catch(s){S.__e(s,e)}n.__P=n.__n=null}if(n=t.__k)for(i=0;i<n.length;i++)n[i]&&Ke(n[i],e,typeof t.type!="function"||r&&!t.props.__P);!r&&(n=t.__c)&&(n=n.__z)&&(a=ye(n,o=[]))&&(n==t.__e&&o.some(Z),Z(a),Z(n)),r||Z(t.__e),t.__e=t.__c=t.__=null}function kr(t,e,r){return this.constructor(t,r)}function Ce(t,e){var r,n,a,o;S.__&&S.__(t,e),e.nodeType==9&&(e=e.documentElement),n=(r=t&&32&t.__u)?null:e.__k,e.__k=ce(Ae,{children:[t]}),a=[],o=[],Ve(e,e.__k,n||ke,ke,e.namespaceURI,n?null:e.firstChild?Be.call(e.childNodes):null,a,n?n.__e:e.firstChild,r,o),yt(a,e.__k,o),e.__k.props.children=null}S={__e:function(t,e,r,n){for(var a,o,i;e=e.__;)if((a=e.__c)&&!(1&a.__g)){a.__g|=4;try{if((i=(o=a.constructor)&&o.getDerivedStateFromError)&&a.setState(o.getDerivedStateFromError(t)),a.componentDidCatch&&(a.componentDidCatch(t,n||{}),i=1),i&&8&a.__g)return void(a.__g|=2)}catch(s){t=s}}throw we=0,t}},ft=0,_r=function(t){return t!=null&&t.constructor===de},pe.prototype.setState=function(t,e){var r=this.__s;r&&r!=this.state||(r=this.__s=Q({},this.state)),typeof t=="function"&&(t=t(Q({},r),this.props)),t&&(Q(r,t),this.__v&&(e&&this.__k.push(e),ut(this)))},pe.prototype.forceUpdate=function(t){this.__v&&(this.__g|=4,t&&this.__h.push(t),ut(this))},pe.prototype.render=Ae,K=[],we=0,mt=function(t,e){return t.__v.__b-e.__v.__b},ve=Symbol(),_t=/(PointerCapture)$|Capture$/i,De=0,Ie={},xr=0;var kt=function(t,e,r,n){var a;e[0]=0;for(var o=1;o<e.length;o++){var i=e[o++],s=e[o]?(e[0]|=i?1:2,r[e[o++]]):e[++o];i===3?n[0]=s:i===4?n[1]=Object.assign(n[1]||{},s):i===5?(n[1]=n[1]||{})[e[++o]]=s:i===6?n[1][e[++o]]+=s+"":i?(a=t.apply(s,kt(t,s,r,["",null])),n.push(a),s[0]?e[0]|=2:(e[o-2]=0,e[o]=a)):n.push(s)}return n},wt=new Map;function Mt(t){var e=wt.get(this);return e||(e=new Map,wt.set(this,e)),(e=kt(this,e.get(t)||(e.set(t,e=(function(r){for(var n,a,o=1,i="",s="",l=[0],h=function(f){o===1&&(f||(i=i.replace(/^\s*\n\s*|\s*\n\s*$/g,"")))?l.push(0,f,i):o===3&&(f||i)?(l.push(3,f,i),o=2):o===2&&i==="..."&&f?l.push(4,f,0):o===2&&i&&!f?l.push(5,0,!0,i):o>=5&&((i||!f&&o===5)&&(l.push(o,0,i,a),o=6),f&&(l.push(o,f,0,a),o=6)),i=""},c=0;c<r.length;c++){c&&(o===1&&h(),h(c));for(var u=0;u<r[c].length;u++)n=r[c][u],o===1?n==="<"?(h(),l=[l],o=3):i+=n:o===4?i==="--"&&n===">"?(o=1,i=""):i=n+i[0]:s?n===s?s="":i+=n:n==='"'||n==="'"?s=n:n===">"?(h(),o=1):o&&(n==="="?(o=5,a=i,i=""):n==="/"&&(o<5||r[c][u+1]===">")?(h(),o===3&&(l=l[0]),o=l,(l=l[0]).push(2,0,o),o=0):n===" "||n==="	"||n===`
`||n==="\r"?(h(),o=2):i+=n),o===3&&i==="!--"&&(o=4,l=l[0])}return h(),l})(t)),e),arguments,[])).length>1?e:e[0]}var $=Mt.bind(We);var he,O,Je,At,Xe=Object.is,fe=0,Nt=[],Ye=[],T=S,Ct=T.__b,St=T.__r,Pt=T.diffed,Tt=T.__c,Ot=T.unmount,zt=T.__;function Qe(t,e){T.__h&&T.__h(O,t,fe||e),fe=0;var r=O.__H||(O.__H={__:[],__h:[]});return t>=r.__.length&&r.__.push({}),r.__[t]}function H(t){return fe=1,Mr(jt,t)}function Mr(t,e,r){var n=Qe(he++,2);if(n.t=t,!n.__c&&(n.__=[r?r(e):jt(void 0,e),function(o){var i=(n.__N||n.__)[0],s=n.t(i,o);Xe(i,s)||(n.__N=[s,n.__[1]],n.__c.setState({}))}],n.__c=O,!O.__f)){O.__f=!0;var a=O.shouldComponentUpdate;O.shouldComponentUpdate=function(o,i,s){var l=this.__H;if(!l)return!0;var h=!1,c=this.props!=o;if(l.__.some(function(f){f.__N&&(h=!0,Xe(f.__[0],f.__N[0])||(c=!0))}),a){var u=a.call(this,o,i,s);return h?u||c:u}return!h||c}}return n.__}function z(t,e){var r=Qe(he++,3);!T.__s&&Rt(r.__H,e)&&(r.__P=!0,r.__=t,r.u=e,O.__H.__h.push(r))}function E(t){return fe=5,G(function(){return{current:t}},[])}function G(t,e){var r=Qe(he++,7);return Rt(r.__H,e)&&(r.__=t(),r.__H=e),r.__}function Lt(t,e){return fe=8,G(function(){return t},e)}function Ar(){var t;do{for(;t=Ye.shift();)try{ue(t)}catch(r){T.__e(r,{__:(t=t.__P)&&t.__v})}for(;t=Nt.shift();){var e=t.__H;if(t.__P&&e)try{e.__h.some(ue),e.__h.some(Ze),e.__h=[]}catch(r){e.__h=[],T.__e(r,t.__v)}}}while(Ye.length)}T.__b=function(t){O=null,Ct&&Ct(t)},T.__=function(t,e){t&&e.__k&&e.__k.__m&&(t.__m=e.__k.__m),zt&&zt(t,e)},T.__r=function(t){St&&St(t),he=0;var e=(O=t.__c).__H;e&&(Je==O?O.__h=[]:(e.__h.some(ue),e.__h.some(Ze),he=0),e.__h=[],e.__.some(function(r){r.__N&&(r.__=r.__N),r.u=r.__N=void 0})),Je=O},T.diffed=function(t){Pt&&Pt(t);var e=t.__c;e&&e.__H&&(e.__H.__h.length&&qt(Nt.push(e)),e.__H.__.some(function(r){r.u&&(r.__H=r.u)})),Je=O=null},T.__c=function(t,e){e.some(function(r){try{r.__h.some(ue),r.__h=r.__h.filter(function(n){return!n.__||Ze(n)})}catch(n){r.__h=[function(){throw n}]}}),Tt&&Tt(t,e)},T.unmount=function(t){Ot&&Ot(t);var e,r,n=t.__c;n&&n.__H&&(n.__H.__.some(function(a){try{if(a.__P&&a.__c){if(r===void 0){for(r=t.__;r&&(!r.__c||!r.__c.__P);)r=r.__;r=r&&r.__c}a.__P=r,qt(Ye.push(a))}else ue(a)}catch(o){e=o}}),n.__H=void 0,e&&T.__e(e,n.__v))};var Et=typeof requestAnimationFrame=="function";function Cr(t){var e,r=function(){clearTimeout(n),Et&&cancelAnimationFrame(e),setTimeout(t)},n=setTimeout(r,35);Et&&(e=requestAnimationFrame(r))}function qt(t){t!=1&&At==T.requestAnimationFrame||((At=T.requestAnimationFrame)||Cr)(Ar)}function ue(t){var e=O,r=t.__c;typeof r=="function"&&(t.__c=void 0,r()),O=e}function Ze(t){var e=O;t.__c=t.__(),O=e}function Rt(t,e){return!t||t.length!=e.length||e.some(function(r,n){return!Xe(r,t[n])})}function jt(t,e){return typeof e=="function"?e(t):e}var Sr={light:{positive:[[250,249,246],[196,221,240],[104,168,214],[23,102,166],[5,48,97]],negative:[[250,249,246],[253,219,179],[244,164,86],[201,98,11],[115,46,4]]},dark:{positive:[[22,24,29],[20,58,92],[32,106,164],[92,172,231],[205,233,255]],negative:[[22,24,29],[84,45,12],[156,84,17],[235,144,60],[255,225,189]]}};function Ut(t){let e=new Uint8ClampedArray(1533);for(let r=0;r<511;r++){let n=Sr[t][r<255?"negative":"positive"],a=Math.abs(r-255)/255*(n.length-1),o=Math.min(Math.floor(a),n.length-2);for(let i=0;i<3;i++){let[s,l]=[n[o][i],n[o+1][i]];e[3*r+i]=s+(l-s)*(a-o)}}return e}var et={light:Ut("light"),dark:Ut("dark")};function tt(){let{jpThemeLight:t}=document.body.dataset;if(t!==void 0)return t==="true"?"light":"dark";for(let e of["light","dark"])if(document.body.classList.contains(`${e}-theme`))return e;return matchMedia("(prefers-color-scheme: dark)").matches?"dark":"light"}var Se=(t,e)=>255+Math.round(255*Math.sign(t)*Math.sqrt(Math.min(1,Math.abs(t)/e))),ne=t=>et[t];function Ht(t,e,r){let n=3*Se(t,e),[a,o,i]=et[r].subarray(n,n+3);return`rgb(${a} ${o} ${i})`}function It(t,e,r){let n=3*Se(t,e),[a,o,i]=et[r].subarray(n,n+3);return .299*a+.587*o+.114*i>140?"#14161a":"#ffffff"}var rt=new Float32Array(65536);for(let t=0;t<rt.length;t++){let e=t>>10&31,r=t&1023,n=e===0?r*2**-24:(1+r/1024)*2**(e-15);rt[t]=t>>15?-n:n}var me=t=>t*(t+1)/2;function Pe(t,e=null){let r=new DataView(t);if(r.getUint32(0)!==1146375473)throw new Error("These are no attention maps.");let n=r.getUint32(4,!0),a=r.getUint32(8,!0),o=r.getUint32(12,!0),i=me(a),s=16,l=null;if(o===2){l=new Float32Array(n),a&&l.set(e.lam.subarray(0,a));for(let c=a;c<n;c++,s+=4)l[c]=r.getFloat32(s,!0)}let h=["first","second"].slice(0,o).map(c=>{let u=new Float32Array(me(n));a&&u.set(e[c].subarray(0,i));for(let f=i;f<u.length;f++,s+=2)u[f]=rt[r.getUint16(s,!0)];return u});return{length:n,lam:l,first:h[0],second:h[1]??null}}function Te(t,e=null){if(!t.second)return t.first;let r=new Float32Array(t.first.length);for(let n=0,a=0;n<t.length;n++){let o=e??t.lam[n];for(let i=0;i<=n;i++,a++)r[a]=t.first[a]-o*t.second[a]}return r}var V=(t,e)=>t.subarray(me(e),me(e+1));function _e(t,...e){let r=me(Math.floor(t/4)),n=0;for(let a of e)for(let o=r;o<a.length;o++){let i=Math.abs(a[o]);i>n&&(n=i)}return n||1}function xe(t){let e=atob(t),r=new Uint8Array(e.length);for(let n=0;n<e.length;n++)r[n]=e.charCodeAt(n);return r.buffer}var Dt={"\n":"⏎","	":"⇥","\r":"␍"},ge=t=>[...t].map(e=>{if(e in Dt)return Dt[e];let r=e.codePointAt(0);return r<32?String.fromCodePoint(9216+r):r===127?"␡":/[\p{Cc}\p{Cf}\p{Zl}\p{Zp}\p{Co}\p{Cn}]/u.test(e)?`⟨${r.toString(16).toUpperCase()}⟩`:e}).join("");function U(t,e=14){let r=ge(t).replace(/^ +/,a=>"␣".repeat(Math.min(3,a.length))),n=[...r];return n.length>e?`${n.slice(0,e-1).join("")}…`:r||"∅"}var j=(t,e=0)=>`${(100*t).toFixed(e)} %`;function A(t,e=3){return t==null||Number.isNaN(t)?"–":(Math.abs(t)>=.001||t===0?t.toFixed(e):t.toExponential(1)).replace("-","−")}var B=(t,e)=>`${t}.${e}`;function Ft(t,e,r,n){let a=[];for(let i=1;i<r.length;i++){let s=V(e,i),l=0;for(let h=1;h<s.length;h++)Math.abs(s[h])>Math.abs(s[l])&&(l=h);a.push([Math.abs(s[l]),i,l,s[l]])}a.sort((i,s)=>s[0]-i[0]);let o=a.slice(0,3).map(([,i,s,l])=>{let[h,c]=[i,s].map(u=>`token ${u+1} “${U(n[u]??"")}”`);return`${h} gives ${A(l,2)} to ${c}`});return`${t}, ${r.length} by ${r.length} weights. The largest after the first row: ${o.join("; ")}.`}var Pr=450;function Bt({models:t,runs:e,view:r,source:n,question:a,onChange:o,onRefusal:i}){let[s,l]=H(!1),[h,c]=H(0),u=E(!1),f=Object.keys(t),p=f.every(m=>e[m]&&e[m].tokens.length<t[m].most_tokens),d=async()=>{if(!u.current){u.current=!0;try{let m=await Promise.all(f.map(g=>n.next({...a(g),temperature:h,seed:0})));o(g=>{let v={...g.added};return f.forEach((y,w)=>v[y]=[...v[y],m[w].token]),{added:v,row:null}})}catch(m){l(!1),i({side:"left",message:m.message})}finally{u.current=!1}}};z(()=>{if(!s)return;if(!p){f.every(g=>e[g])&&l(!1);return}let m=setTimeout(d,Pr);return()=>clearTimeout(m)});let x=()=>{l(!1),o({added:{left:[],right:[]},row:null})},_=m=>e[m]?.pieces.slice(e[m].pieces.length-r.added[m].length)??[];return $`
    <section class="card generation" aria-labelledby="generation-title">
      <h2 id="generation-title">Token by token</h2>
      <div class="buttons">
        <button type="button" disabled=${!p} onClick=${d}>Step</button>
        <button type="button" disabled=${!p&&!s} aria-pressed=${s}
          onClick=${()=>l(!s)}>${s?"Pause":"Play"}</button>
        <button type="button" disabled=${!r.added.left.length} onClick=${x}>Begin again</button>
        <label class="temperature">Temperature
          <select value=${h} onChange=${m=>c(Number(m.target.value))}>
            ${[0,.5,.8,1,1.5].map(m=>$`<option key=${m} value=${m}>${m||"0, most likely"}</option>`)}
          </select>
        </label>
      </div>
      ${f.map(m=>r.added[m].length>0&&$`
        <p class="written" key=${m}><span class="quiet">${t[m].label} </span>
          ${_(m).map((g,v,y)=>$`<span class=${v===y.length-1?"last":""}>${ge(g)}</span>${t[m].between}`)}
        </p>`)}
      <p class="quiet">Each token adds a row to every map, at the bottom; both models write one at a time.</p>
    </section>`}function nt(t,e,r){let n=new Float32Array(r*r);for(let a=0,o=0;a<e;a++){let i=r*Math.floor(a*r/e);for(let s=0;s<=a;s++,o++){let l=i+Math.floor(s*r/e);Math.abs(t[o])>Math.abs(n[l])&&(n[l]=t[o])}}return n}function Wt(t,e,r,n){(t.width!==r||t.height!==r)&&(t.width=t.height=r);let a=t.getContext("2d"),o=a.createImageData(r,r),i=ne(n);for(let s=0;s<e.length;s++){let l=3*e[s];o.data[4*s]=i[l],o.data[4*s+1]=i[l+1],o.data[4*s+2]=i[l+2],o.data[4*s+3]=255}a.putImageData(o,0,0)}function Oe(t,e,r,n,a,o=640){let i=Math.min(r,o),s=nt(e,r,i);Wt(t,Uint16Array.from(s,l=>Se(l,n)),i,a)}function ze(t,e,r,n){Wt(t,Uint16Array.from(e,a=>255+Math.round(255*a/127)),r,n)}function Ee(){let t=E(null),[e,r]=H(0);return z(()=>{let n=new ResizeObserver(([a])=>r(Math.floor(a.contentRect.width)));return n.observe(t.current),()=>n.disconnect()},[]),[t,e]}var Vt=168,ee={left:44,right:10,top:26,bottom:18};function ot(t,e,r,n,a,o=Vt){let i=V(t.first,n),s=V(e,n),l=t.second?r??t.lam[n]:0,h=t.second?V(t.second,n).map(w=>l*w):null,[c,u]=[0,1e-9];for(let w of[i,s,h??i])for(let k of w)k<c&&(c=k),k>u&&(u=k);let f={width:a-ee.left-ee.right,height:o-ee.top-ee.bottom},p=f.width/t.length,d=w=>ee.left+(w+.5)*p,x=w=>ee.top+(u-w)/(u-c)*f.height,_=w=>`M${Array.from(w,(k,C)=>`${d(C).toFixed(1)},${x(k).toFixed(1)}`).join("L")}`,m=Math.max(1,Math.min(14,p*.62)),g=Array.from(s,(w,k)=>[d(k)-m/2,x(Math.max(0,w)),m,Math.abs(x(w)-x(0)),w]),v=Array.from(s,(w,k)=>[Math.abs(w),k]).sort((w,k)=>k[0]-w[0]).slice(0,4).filter(([w])=>w>.08*u).map(([,w])=>w),y=v.filter((w,k)=>v.slice(0,k).every(C=>Math.abs(d(w)-d(C))>56));return{first:_(i),taken:h&&_(h),bars:g,zero:x(0),x:d,y:x,low:c,high:u,labelled:y,left:s,end:a-ee.right}}function Gt({maps:t,net:e,lam:r,pieces:n,row:a,isPinned:o}){let[i,s]=Ee(),l=s>120?ot(t,e,r,a,s):null;return $`
    <figure class="curve" ref=${i}>
      <figcaption>
        <span>Row of token ${a+1} <b>${U(n[a]??"",24)}</b>${o?$` <span class="quiet">pinned</span>`:""}</span>
        ${t.second&&$`<span class="legend" aria-hidden="true"><i class="first"></i>A₁<i class="taken"></i>λA₂<i class="net"></i>A₁ − λA₂</span>`}
      </figcaption>
      ${l&&$`
        <svg width=${s} height=${Vt} role="img" aria-label=${Tr(l,n,a)}>
          <line class="axis" x1="44" x2=${l.end} y1=${l.zero} y2=${l.zero} />
          <text class="tick" x="38" y=${l.y(l.high)} dy="0.32em" text-anchor="end">${A(l.high,2)}</text>
          <text class="tick" x="38" y=${l.zero} dy="0.32em" text-anchor="end">0</text>
          ${l.low<-.12*l.high&&$`<text class="tick" x="38" y=${l.y(l.low)} dy="0.32em" text-anchor="end">${A(l.low,2)}</text>`}
          ${l.bars.map(([h,c,u,f,p],d)=>$`<rect key=${d} class=${p<0?"net negative":"net"} x=${h} y=${p<0?l.zero:c} width=${u} height=${f} />`)}
          <path class="first" d=${l.first} />
          ${l.taken&&$`<path class="taken" d=${l.taken} />`}
          ${l.labelled.map(h=>$`<text key=${`l${h}`} class="peak" x=${Math.max(60,Math.min(l.end-20,l.x(h)))}
            y=${l.y(Math.max(l.left[h],0))-7} text-anchor="middle">${U(n[h]??"",10)}</text>`)}
        </svg>`}
    </figure>`}var Tr=(t,e,r)=>`What token ${r+1} “${U(e[r]??"")}” attends to after the subtraction, most to ${t.labelled.map(n=>`token ${n+1} “${U(e[n]??"")}” with ${A(t.left[n],2)}`).join(", ")}.`;var qe={light:["#1c1e22","#6b6f76","#fbfaf7"],dark:["#eceae4","#9a9da4","#121419"]},Kt={light:["#1766a6","#c9620b"],dark:["#5cace7","#eb903c"]},Or="system-ui, -apple-system, 'Segoe UI', sans-serif",zr=t=>t.replace(/[&<>"]/g,e=>`&#${e.charCodeAt(0)};`);function D(t,e,r,{size:n=12,colour:a,anchor:o="start",weight:i=400,turn:s=0}){let l=s?` transform="rotate(${s} ${t} ${e})"`:"";return`<text x="${t}" y="${e}" font-size="${n}" fill="${a}" text-anchor="${o}" font-weight="${i}"${l}>${zr(r)}</text>`}function Xt(t,e,r,n){return[`<svg xmlns="http://www.w3.org/2000/svg" width="${t}" height="${e}" viewBox="0 0 ${t} ${e}" font-family="${Or}">`,`<rect width="${t}" height="${e}" fill="${qe[r][2]}"/>`,...n,"</svg>"].join(`
`)}var Yt=(t,e,r,n)=>`<image x="${e}" y="${r}" width="${n}" height="${n}" style="image-rendering:pixelated" href="${t.toDataURL("image/png")}"/>`;function Er({models:t,view:e,panels:r,pieces:n,row:a,scale:o,lam:i,theme:s,left:l,net:h}){let[c,u]=qe[s],f=300,p=52,d=28,x=40+r.length*(f+p)+(r.length-1)*d,_=[D(20,34,`${t.left.name}: layer ${e.left.layer}, head ${e.left.head}${i==null?"":`, λ = ${A(i,2)}`}`,{size:17,colour:c,weight:600})];r.forEach((w,k)=>{let C=20+p+k*(f+p+d),M=66+p,I=document.createElement("canvas");Oe(I,w.weights,w.maps.length,o,s),_.push(D(C,M-p-8,w.name,{size:14,colour:c,weight:600}),Yt(I,C,M,f));let q=f/w.maps.length;for(let L=0;L<w.maps.length;L+=Math.max(1,Math.ceil(11/q))){let R=U(n[w.side][L]??"",8),b=(L+.5)*q+3.5;_.push(D(C-4,M+b,R,{size:9.5,colour:u,anchor:"end"})),_.push(D(C+b,M-4,R,{size:9.5,colour:u,turn:-90}))}_.push(`<rect x="${C}" y="${M+Math.min(a,w.maps.length-1)*q}" width="${f}" height="${Math.max(1.5,q)}" fill="none" stroke="${c}"/>`)});let m=66+p+f+40,g=Math.min(a,l.length-1),v=ot(l,h,l.second?i:null,g,x-40);_.push(D(20,m,`Row of token ${g+1} “${U(n.left[g]??"",24)}”`,{size:13,colour:c,weight:600})),_.push(`<g transform="translate(20 ${m+6})">`),_.push(...v.bars.map(([w,k,C,M,I])=>`<rect x="${w}" y="${I<0?v.zero:k}" width="${C}" height="${M}" fill="${c}" opacity="0.32"/>`)),_.push(`<path d="${v.first}" fill="none" stroke="${Kt[s][0]}" stroke-width="1.6"/>`),v.taken&&_.push(`<path d="${v.taken}" fill="none" stroke="${Kt[s][1]}" stroke-width="1.6"/>`),_.push(`<line x1="44" x2="${v.end}" y1="${v.zero}" y2="${v.zero}" stroke="${u}"/>`),_.push(...v.labelled.map(w=>D(v.x(w),v.y(Math.max(0,v.left[w]))-7,U(n.left[w]??"",12),{size:11,colour:c,anchor:"middle"}))),_.push(D(38,v.y(v.high)+4,A(v.high,2),{size:10,colour:u,anchor:"end"}),"</g>");let y=m+200;return _.push(...qr(36,y,o,s)),l.second&&_.push(D(x-20,y+10,"blue line A₁, orange line λA₂, bars A₁ − λA₂",{size:11,colour:u,anchor:"end"})),Xt(x,y+44,s,_)}function qr(t,e,r,n){let a=ne(n),o=[];for(let i=0;i<64;i++){let s=3*Math.round(510*i/63);o.push(`<rect x="${t+4*i}" y="${e}" width="4.2" height="10" fill="rgb(${a[s]},${a[s+1]},${a[s+2]})"/>`)}return[-1,0,1].forEach(i=>o.push(D(t+128*(1+i),e+24,A(i*r,2),{size:10,colour:qe[n][1],anchor:"middle"}))),o}function Nr(t,e,r,n){let[a,o]=qe[n],i=t.heads>8?48:96,s=i+(t.heads>8?8:24),l=[D(20,34,`${t.name}: ${t.label}, all heads`,{size:17,colour:a,weight:600})];for(let h=1;h<=t.layers;h++){let c=56+(h-1)*s;l.push(D(34,c+i/2+4,String(h),{size:11,colour:o,anchor:"end"}));for(let u=1;u<=t.heads;u++){let f=44+(u-1)*(i+8),p=document.createElement("canvas");if(ze(p,r(h,u),e.picture_size,n),l.push(Yt(p,f,c,i)),i>60){let d=e.removed?.[h-1][u-1],x=d===void 0?B(h,u):`${B(h,u)}  −${j(d)}`;l.push(D(f,c+i+14,x,{size:10.5,colour:o}))}}}return Xt(64+t.heads*(i+8),64+t.layers*s+8,n,l)}function Jt(t,e){let r=document.createElement("a");r.href=URL.createObjectURL(t),r.download=e,r.click(),setTimeout(()=>URL.revokeObjectURL(r.href),1e4)}async function Zt(t,e,r){let n=new Blob([t],{type:"image/svg+xml"});if(r==="svg"){Jt(n,`${e}.svg`);return}let a=new Image;a.src=URL.createObjectURL(n),await a.decode();let o=document.createElement("canvas");[o.width,o.height]=[2*a.width,2*a.height],o.getContext("2d").drawImage(a,0,0,o.width,o.height),URL.revokeObjectURL(a.src),o.toBlob(i=>Jt(i,`${e}.png`),"image/png")}var at=(t,e)=>Zt(Er(t),`head-${B(t.view.left.layer,t.view.left.head)}`,e),st=(t,e,r,n,a)=>Zt(Nr(t,e,r,n),`heads-${t.name}`,a);function Lr({picture:t,side:e,theme:r}){let n=E(null);return z(()=>{t&&ze(n.current,t,e,r)},[t,e,r]),$`<canvas ref=${n} width="8" height="8" aria-hidden="true"></canvas>`}var Rr={ArrowLeft:[0,-1],ArrowRight:[0,1],ArrowUp:[-1,0],ArrowDown:[1,0]};function Qt({side:t,model:e,run:r,chosen:n,theme:a,onChoose:o}){let i=E(null),s=r?.heads,l=G(()=>{if(!s)return null;let x=typeof s.pictures=="string"?new Int8Array(xe(s.pictures)):s.pictures,_=s.picture_size**2;return(m,g)=>x.subarray(((m-1)*e.heads+g-1)*_,((m-1)*e.heads+g)*_)},[s?.pictures]),h=x=>{let _=Rr[x.key];if(!_)return;x.preventDefault();let m=Math.min(e.layers,Math.max(1,n.layer+_[0])),g=Math.min(e.heads,Math.max(1,n.head+_[1]));o({layer:m,head:g}),i.current.querySelector(`[data-head="${B(m,g)}"]`)?.focus()},c=x=>Array.from({length:x},(_,m)=>m+1),u=(x,_)=>s?.removed?.[x-1][_-1],f=(x,_)=>s?.on_answer?.[x-1][_-1],p=(x,_)=>[`Head ${B(x,_)}`,u(x,_)!==void 0&&`the subtraction removes ${j(u(x,_))} of A1`,f(x,_)!==void 0&&`${j(f(x,_))} on the answer`].filter(Boolean).join(", "),d=e.heads>8;return $`
    <section class=${`card grid-card ${d?"dense":""}`} aria-labelledby=${`grid-${t}`}>
      <div class="card-head">
        <h2 id=${`grid-${t}`}>${e.label}, all heads</h2>
        <span class="buttons">
          <button type="button" class="link" disabled=${!s} onClick=${()=>st(e,s,l,a,"png")}>PNG</button>
          <button type="button" class="link" disabled=${!s} onClick=${()=>st(e,s,l,a,"svg")}>SVG</button>
        </span>
      </div>
      <div class="scroll">
        <div class="grid" role="grid" aria-label=${`Heads of ${e.name}`} ref=${i} onKeyDown=${h}
          style=${`--heads:${e.heads};--thumb:${d?44:e.heads>4?92:124}px`}>
          ${c(e.layers).map(x=>$`
            <div class="grid-row" role="row" key=${x}>
              <span class="layer" role="rowheader"><span class="hidden">Layer </span>${x}</span>
              ${c(e.heads).map(_=>{let m=n.layer===x&&n.head===_;return $`
                  <button type="button" role="gridcell" key=${_} class=${`head ${m?"chosen":""}`}
                    aria-selected=${m} tabindex=${m?0:-1} data-head=${B(x,_)}
                    aria-label=${p(x,_)} title=${p(x,_)} onClick=${()=>o({layer:x,head:_})}>
                    <${Lr} picture=${l?.(x,_)} side=${s?.picture_size} theme=${a} />
                    ${!d&&$`<span class="numbers" aria-hidden="true">
                      ${u(x,_)!==void 0&&$`<span>${u(x,_)>.005?"−":""}${j(u(x,_))}</span>`}
                      ${f(x,_)!==void 0&&$`<span class="on-answer">◎ ${j(f(x,_))}</span>`}
                    </span>`}
                    ${d&&u(x,_)!==void 0&&$`<span class="gauge" aria-hidden="true" style=${{width:`${100*u(x,_)}%`}}></span>`}
                  </button>`})}
            </div>`)}
        </div>
      </div>
      <p class="quiet">
        Rows are layers, the first on top.
        ${e.subtracts&&(d?" The bar is the share of A₁ that the subtraction removes.":" −n %: the share of A₁ that the subtraction removes.")}
        ${s?.on_answer&&!d?" ◎: the share of the attention that is on the answer.":""}
      </p>
    </section>`}var jr=46,Ur=11;function er({panel:t,pieces:e,size:r,scale:n,theme:a,row:o,answer:i,added:s,onHover:l,onPin:h}){let c=E(null),{maps:u,weights:f,name:p}=t;z(()=>{Oe(c.current,f,u.length,n,a)},[f,u.length,n,a]);let d=r>=200?jr:0,x=r-d,_=x/u.length,m=Math.max(1,Math.ceil(Ur/_)),g=[];if(d)for(let k=0;k<u.length;k+=m)g.push(k);let v=k=>{let C=c.current.getBoundingClientRect(),M=Math.floor((k.clientY-C.top)/C.height*u.length);return Math.max(0,Math.min(u.length-1,M))},y=k=>d+(k+.5)*_,w=i&&i.end<=u.length;return $`
    <figure class=${`map ${t.strong?"strong":""}`}>
      <figcaption>${p}</figcaption>
      <div class="map-box" style=${{width:`${r}px`,height:`${r}px`}}>
        <canvas ref=${c} width="8" height="8" role="img" aria-label=${Ft(p,f,u,e)}
          data-map=${t.key} style=${{left:`${d}px`,top:`${d}px`,width:`${x}px`,height:`${x}px`}}
          onPointerMove=${k=>l(v(k))} onPointerLeave=${()=>l(null)}
          onClick=${k=>h(v(k))}></canvas>
        <svg width=${r} height=${r} aria-hidden="true">
          ${g.map(k=>$`
            <text key=${`r${k}`} x=${d-4} y=${y(k)} class=${k===o?"on":""} dy="0.32em"
              text-anchor="end">${U(e[k]??"",7)}</text>
            <text key=${`c${k}`} transform=${`translate(${y(k)} ${d-4}) rotate(-90)`} dy="0.32em">${U(e[k]??"",7)}</text>`)}
          ${w&&$`<rect class="answer" x=${d+i.begin*_} y=${d}
            width=${Math.max(1.5,(i.end-i.begin)*_)} height=${x} />`}
          ${s>0&&$`<line class="added" x1=${d} x2=${r} y1=${d+(u.length-s)*_}
            y2=${d+(u.length-s)*_} />`}
          <rect class="row" x=${d} y=${d+o*_} width=${x} height=${Math.max(2,_)} />
        </svg>
      </div>
    </figure>`}function tr({scale:t,theme:e}){let r=E(null);z(()=>{let a=r.current.getContext("2d"),o=a.createImageData(511,1),i=ne(e);for(let s=0;s<511;s++){for(let l=0;l<3;l++)o.data[4*s+l]=i[3*s+l];o.data[4*s+3]=255}a.putImageData(o,0,0)},[e]);let n=[-1,-.25,0,.25,1];return $`
    <div class="scale" role="img" aria-label=${`Colours from orange at −${A(t,2)} over the background at 0 to blue at ${A(t,2)}`}>
      <canvas ref=${r} width="511" height="1"></canvas>
      <div class="ticks" aria-hidden="true">
        ${n.map(a=>$`<span key=${a} style=${{left:`${50+50*Math.sign(a)*Math.sqrt(Math.abs(a))}%`}}>${Math.abs(a)===1?`${a<0?"≤ ":"≥ "}${A(a*t,2)}`:A(a*t,2)}</span>`)}
      </div>
    </div>`}function rr({pieces:t,values:e,scale:r,theme:n,row:a,pinned:o,answer:i,added:s,between:l,onHover:h,onPin:c,onAnswer:u}){let f=E(null),p=i!==null&&o>=i.begin&&o<i.end,d=m=>{let v={ArrowLeft:-1,ArrowRight:1,ArrowUp:-10,ArrowDown:10,Home:-t.length,End:t.length}[m.key];if(m.key==="Escape"&&o!==null)c(o);else if(v!==void 0){m.preventDefault();let y=Math.max(0,Math.min(t.length-1,a+v));h(null),y!==o&&c(y)}},x=m=>{let g=m.target.closest("[data-token]");return g?Number(g.dataset.token):null},_=m=>["token",m===a&&"on",m===o&&"pinned",i&&m>=i.begin&&m<i.end&&"answer",m>=t.length-s&&"new"].filter(Boolean).join(" ");return $`
    <div class="flow-head">
      <span class="quiet">What token <b>${a+1}</b> attends to. Hover a token or use the arrow keys; a click pins it${o!==null?", Esc lets go":""}.</span>
      ${o!==null&&o<t.length-1&&$`<button type="button" class="link"
          onClick=${()=>u(p?null:{query:t.length-1,begin:o,end:o+1})}>${p?"No longer the answer":"Mark as the answer"}</button>`}
    </div>
    <div class=${`flow ${l?"spaced":""}`} role="listbox" tabindex="0" aria-label="Tokens of the text" ref=${f}
      aria-activedescendant=${`token-${a}`} onKeyDown=${d} onPointerOver=${m=>h(x(m))}
      onPointerLeave=${()=>h(null)} onClick=${m=>x(m)!==null&&c(x(m))}>
      ${t.map((m,g)=>{let v=g<e.length?e[g]:0,y=g<e.length?{background:Ht(v,r,n),color:It(v,r,n)}:{};return $`<span key=${g} id=${`token-${g}`} class=${_(g)} style=${y} role="option"
          data-token=${g} aria-selected=${g===a} title=${`token ${g+1}: ${A(v)}`}>${ge(m)}</span>${m.includes(`
`)?$`<br />`:""}`})}
    </div>`}var or={text:"",added:{left:[],right:[]},answer:null,lambdas:{all:null,layers:{},heads:{}},left:{layer:1,head:1},right:{layer:1,head:1},row:null},Hr=({layer:t,head:e})=>`${t}.${e}`,nr=t=>t.split(",").filter(Boolean).map(Number);function Ne(t){let e=new URLSearchParams;e.set("text",t.text);for(let i of["left","right"])e.set(i,Hr(t[i])),t.added[i].length&&e.set(`${i}-added`,t.added[i].join(","));let{all:r,layers:n,heads:a}=t.lambdas,o=[...r===null?[]:[["all",r]],...Object.entries(n),...Object.entries(a)];return o.length&&e.set("lambda",o.map(([i,s])=>`${i}:${s}`).join(",")),t.answer&&e.set("answer",[t.answer.query,t.answer.begin,t.answer.end].join(",")),t.row!==null&&e.set("row",t.row),`#${e}`}function it(t,e,r){let n=new URLSearchParams(t.slice(1));if(!n.has("text"))return e;let a={...e,text:n.get("text"),answer:null,added:{left:[],right:[]}};for(let s of["left","right"]){let[l,h]=(n.get(s)??"").split(".").map(Number),c=r[s];c&&l>=1&&l<=c.layers&&h>=1&&h<=c.heads&&(a[s]={layer:Math.floor(l),head:Math.floor(h)});let u=nr(n.get(`${s}-added`)??"");u.every(Number.isInteger)&&(a.added[s]=u)}a.lambdas={all:null,layers:{},heads:{}};for(let s of(n.get("lambda")??"").split(",")){let[l,h]=s.split(":"),c=Number(h);h===void 0||!Number.isFinite(c)||(l==="all"?a.lambdas.all=c:/^\d+$/.test(l)?a.lambdas.layers[l]=c:/^\d+\.\d+$/.test(l)&&(a.lambdas.heads[l]=c))}let o=nr(n.get("answer")??"");o.length===3&&o.every(Number.isInteger)&&(a.answer={query:o[0],begin:o[1],end:o[2]});let i=Number(n.get("row")??NaN);return Number.isInteger(i)&&i>=0&&(a.row=i),a}var oe=({all:t,layers:e,heads:r},{layer:n,head:a})=>r[`${n}.${a}`]??e[n]??t,ae=({all:t,layers:e,heads:r})=>t!==null||Object.keys(e).length>0||Object.keys(r).length>0;function Ir({heads:t,kv_heads:e},{head:r}){if(e===t)return"";let n=t/e,a=Math.ceil(r/n);return`shares key/value head ${a} with heads ${(a-1)*n+1}–${a*n}`.replace(/heads (\d+)–\1$/,"head $1")}function ar({models:t,runs:e,maps:r,view:n,theme:a,row:o,hovered:i,shared:s,onHover:l,onChange:h,live:c,hasAddress:u}){let[f,p]=Ee(),[d,x]=[r.left,r.right],_=d&&d.head.layer===n.left.layer&&d.head.head===n.left.head,m=t.left.subtracts?oe(n.lambdas,n.left):null,g=_?m:null,v=G(()=>d?Te(d,g):null,[d,g]),y=G(()=>d?Math.max(_e(d.length,d.first,d.second??[],v),x?_e(x.length,x.first):0):1,[d,x,v]),w={left:e.left?.pieces??[],right:e.right?.pieces??[]},k=d?g??d.lam?.[Math.min(o,d.length-1)]:null,C=B(n.left.layer,n.left.head),M=[];if(d?.second&&(M.push({key:"first",name:"A₁",side:"left",maps:d,weights:d.first}),M.push({key:"second",name:"A₂",side:"left",maps:d,weights:d.second}),M.push({key:"net",name:"A₁ − λA₂",side:"left",maps:d,weights:v,strong:!0})),x){let P=`${t.right.label} ${B(x.head.layer,x.head.head)}`;M.push({key:"right",name:P,side:"right",maps:x,weights:x.first})}let I=p>=(M.length===3?540:860)?M.length:Math.min(2,M.length),q=p>=860?20:12,L=Math.max(0,Math.floor((p-q*(I-1))/Math.max(1,I))),R=P=>h(X=>({row:X.row===P?null:P})),b=[Ir(t.left,n.left)];t.left.lambda_per_token&&b.push("DIFF V2: a λ for every token");let N={models:t,view:n,panels:M,pieces:w,row:o,scale:y,lam:k,theme:a,left:d,net:v,right:x};return $`
    <section class="card head-view" aria-labelledby="head-title">
      <div class="card-head">
        <h2 id="head-title">
          Layer ${n.left.layer}, head ${n.left.head}
          ${k!=null&&$` <span class="quiet">λ = ${A(k,2)}</span>`}
          ${b.filter(Boolean).map(P=>$` <span class="quiet note">${P}</span>`)}
        </h2>
        <span class="buttons">
          ${u&&$`<button type="button" class="link" onClick=${()=>navigator.clipboard?.writeText(location.href.split("#")[0]+Ne(n))}>Copy link</button>`}
          <button type="button" class="link" disabled=${!d} onClick=${()=>at(N,"png")}>PNG</button>
          <button type="button" class="link" disabled=${!d} onClick=${()=>at(N,"svg")}>SVG</button>
        </span>
      </div>
      <div ref=${f} class="panels" style=${{gridTemplateColumns:`repeat(${I||1}, 1fr)`,gap:`${q}px`}}>
        ${L>0&&M.map(P=>$`
          <${er} key=${P.key} panel=${P} pieces=${w[P.side]} size=${L} scale=${y} theme=${a}
            row=${Math.min(o,P.maps.length-1)} answer=${P.side==="left"||s?n.answer:null}
            added=${n.added[P.side].length} head=${P.side==="left"?C:null}
            onHover=${l} onPin=${R} />`)}
      </div>
      <${tr} scale=${y} theme=${a} />
      ${d&&$`
        <${rr} pieces=${w.left.slice(0,d.length)} values=${V(v,Math.min(o,d.length-1))} scale=${y} theme=${a}
          between=${t.left.between} row=${Math.min(o,d.length-1)} pinned=${n.row} answer=${n.answer} added=${n.added.left.length}
          onHover=${l} onPin=${R} onAnswer=${P=>h({answer:P})} />
        <${Gt} maps=${d} net=${v} lam=${g} pieces=${w.left} row=${Math.min(o,d.length-1)}
          isPinned=${n.row!==null&&i===null} />`}
      ${!c&&Dr(m)}
    </section>`}var Dr=t=>t!==null&&$`<p class="quiet">In this saved page A₁ and A₂ are those of the learned λ; the explorer’s server computes them anew.</p>`;var Fr=-.5,Br=1.5,lt=t=>t.reduce((e,r)=>e+r,0)/t.length;function ct({id:t,name:e,note:r,value:n,learned:a,isSet:o,inherited:i,main:s,onInput:l,onLearned:h}){let c=Math.min(Fr,Math.floor(10*a)/10),u=Math.max(Br,Math.ceil(10*a)/10),f=d=>(d-c)/(u-c),p=Math.max(c,Math.min(u,n));return $`
    <div class=${`slider ${s?"main":""} ${o?"set":""}`}>
      <div class="slider-head">
        <label for=${t}>${e}${r&&$` <span class="quiet">${r}</span>`}</label>
        <output for=${t}>λ = ${A(n,2)}</output>
      </div>
      <div class="track" style=${`--zero-part:${f(0)};--learned-part:${f(a)}`}>
        <input id=${t} type="range" min=${c} max=${u} step="0.01" value=${p}
          aria-valuetext=${`λ ${A(n,2)}; learned ${A(a,2)}`}
          onInput=${d=>l(Number(d.target.value))} />
        <span class="mark zero" aria-hidden="true"></span>
        <span class="mark learned" aria-hidden="true"></span>
      </div>
      <div class="slider-foot">
        <span class="quiet">${o?`learned ${A(a,2)}`:i?"as set above":"as learned"}</span>
        <span class="buttons">
          <button type="button" disabled=${!o} onClick=${h}
            aria-label=${`${e}: back to ${i?"what is set above":"the learned λ"}`}>
            ${i?"As above":"Learned"}
          </button>
          <button type="button" onClick=${()=>l(0)} aria-label=${`${e}: set λ to 0`}>0</button>
        </span>
      </div>
    </div>`}var sr=(t,e)=>Object.fromEntries(Object.entries(t).filter(([r])=>r!==String(e)));function ir({model:t,run:e,place:r,lambdas:n,onChange:a}){if(!e?.learned_lambdas)return $`<section class="card lambda" aria-busy="true"><h2>λ</h2></section>`;let o=e.learned_lambdas,{layer:i,head:s}=r,l=`${i}.${s}`,{all:h,layers:c,heads:u}=n,f=lt(o[i-1]),p=h===null?"on average":"";return $`
    <section class="card lambda" aria-labelledby="lambda-title">
      <div class="card-head">
        <h2 id="lambda-title">Move λ</h2>
        <button type="button" class="link" disabled=${!ae(n)}
          onClick=${()=>a({all:null,layers:{},heads:{}})}>All as learned</button>
      </div>
      <${ct} id="lambda-all" main name="All layers" note=${p} value=${h??lt(o.flat())}
        learned=${lt(o.flat())} isSet=${h!==null}
        onInput=${d=>a({all:d,layers:{},heads:{}})}
        onLearned=${()=>a({...n,all:null})} />
    </section>
    <div class="finer">
      <details open=${Object.keys(c).length+Object.keys(u).length>0||void 0}>
        <summary>One layer, one head</summary>
        <${ct} id="lambda-layer" name=${`Layer ${i}`} value=${c[i]??h??f}
          learned=${f} isSet=${i in c} inherited=${h!==null}
          onInput=${d=>a({...n,layers:{...c,[i]:d}})}
          onLearned=${()=>a({...n,layers:sr(c,i)})} />
        <${ct} id="lambda-head" name=${`Head ${l}`} value=${oe(n,r)??o[i-1][s-1]}
          learned=${o[i-1][s-1]} isSet=${l in u} inherited=${h!==null||i in c}
          onInput=${d=>a({...n,heads:{...u,[l]:d}})}
          onLearned=${()=>a({...n,heads:sr(u,l)})} />
      </details>
      <p class="quiet hint">
        λ = 0 leaves A<sub>1</sub>: ordinary attention.
        ${t.lambda_per_token?" DIFF V2 computes a λ for every token; a slider gives all of them the same.":""}
        ${e.recorded_at!==void 0?` What the model predicts was recorded at λ = ${A(e.recorded_at,2)}.`:""}
      </p>
    </div>`}function te({name:t,value:e,before:r,title:n}){return $`
    <tr title=${n}>
      <th scope="row">${t}</th>
      <td><b>${e}</b></td>
      <td class="before">${r??""}</td>
    </tr>`}function lr({run:t,right:e,models:r}){if(!t)return $`<section class="card predictions" aria-busy="true"><h2>Next token</h2></section>`;let n=t.next.slice(0,10),a=Math.max(...t.next.flatMap(s=>[s.probability,s.learned_probability]),1e-9),o=s=>({width:`${100*s/a}%`}),i=t.divergence>0;return $`
    <section class="card predictions" aria-labelledby="next-title">
      <h2 id="next-title">Next token</h2>
      <table class="bars">
        <caption class="hidden">The ten most likely next tokens, with λ as set and as learned</caption>
        <thead class="hidden"><tr><th>token</th><th>bar</th><th>probability</th><th>with the learned λ</th></tr></thead>
        <tbody>
          ${n.map(s=>$`
            <tr key=${s.token}>
              <th scope="row">${U(s.piece)}</th>
              <td class="bar" aria-hidden="true">
                <span class="now" style=${o(s.probability)}></span>
                <span class="was" style=${{left:`${100*s.learned_probability/a}%`}}></span>
              </td>
              <td class="value">${j(s.probability,1)}</td>
              <td class="value was-value">${i?j(s.learned_probability,1):""}</td>
            </tr>`)}
        </tbody>
      </table>
      ${i&&$`<p class="quiet key"><span class="was-key"></span> with the learned λ</p>`}
      <table class="measures" aria-live="polite">
        <thead><tr><td></td><th scope="col">now</th><th scope="col">learned λ</th></tr></thead>
        <tbody>
          <${te} name="KL to the learned λ" value=${`${A(t.divergence)} nats`}
            title="KL(learned ‖ now) of the next token’s distributions" />
          <${te} name="Loss on the text" value=${A(t.loss)} before=${A(t.learned_loss)}
            title="Mean over the tokens from the second on, in nats" />
          ${t.answer_probability!==void 0&&$`<${te} name="Probability of the answer"
            value=${j(t.answer_probability,1)} before=${j(t.learned_answer_probability,1)} />`}
          ${t.answer_share!==void 0&&$`<${te} name="Attention on the answer" value=${j(t.answer_share,1)}
            before=${j(t.learned_answer_share,1)}
            title="Mean over heads of the share of the absolute weights in the row of the question" />`}
        </tbody>
        ${e&&$`<tbody class="beside">
          <tr><th scope="rowgroup" colspan="3">${r.right.label}</th></tr>
          <${te} name="Loss on the text" value=${A(e.loss)} />
          ${e.answer_probability!==void 0&&$`<${te} name="Probability of the answer" value=${j(e.answer_probability,1)} />`}
          ${e.answer_share!==void 0&&$`<${te} name="Attention on the answer" value=${j(e.answer_share,1)} />`}
          <tr><th scope="row">Next token</th><td colspan="2">${e.next.slice(0,2).map(s=>`“${U(s.piece)}” ${j(s.probability)}`).join(", ")}</td></tr>
        </tbody>`}
      </table>
    </section>`}var se=class extends Error{},Le=class{live=!0;hasAddress=!0;constructor(e="api/"){this.address=e}async#e(e,r){let n;try{n=await fetch(this.address+e,{method:"POST",headers:{"Content-Type":"application/json"},body:JSON.stringify(r)})}catch{throw new se("The explorer does not answer; its command may have ended.")}if(!n.ok){let a=await n.json().catch(()=>({}));throw new se(a.error??`The explorer answered ${n.status}.`)}return n}run=async e=>(await this.#e("run",e)).json();map=async e=>(await this.#e("map",e)).arrayBuffer();next=async e=>(await this.#e("next",e)).json();example=async e=>(await this.#e("example",e)).json()},be=class{#e=!1;#t=null;ask(e){if(this.#e){this.#t=e;return}this.#e=!0,e().finally(()=>{this.#e=!1;let r=this.#t;this.#t=null,r&&this.ask(r)})}get waits(){return this.#t!==null}};function cr({data:t,source:e,view:r,onChange:n,onRefusal:a}){let[o,i]=H(r.text),s=E(0),l=E(null);z(()=>i(r.text),[r.text]);let h=(f,p=null)=>{clearTimeout(l.current),n({text:f,answer:p,added:{left:[],right:[]},row:null})},c=f=>{i(f),clearTimeout(l.current),l.current=setTimeout(()=>h(f),350)},u=async()=>{try{s.current+=1;let f=await e.example({seed:s.current});h(f.text,f.answer)}catch(f){a({side:"left",message:f.message})}};return $`
    <section class="card text" aria-labelledby="text-title">
      <div class="card-head">
        <h2 id="text-title"><label for="text">Text</label></h2>
        ${e.live&&t.draws_examples&&$`<button type="button" class="link" onClick=${u}>New needles</button>`}
      </div>
      <textarea id="text" rows="4" spellcheck="false" readonly=${!e.live} value=${o}
        onInput=${f=>c(f.target.value)}></textarea>
      ${e.live&&t.examples.length>0&&$`<p class="examples">
        ${t.examples.map(f=>$`<button type="button" class="chip" key=${f.title}
            onClick=${()=>h(f.text,f.answer)}>${f.title}</button>`)}
      </p>`}
      ${!e.live&&$`<p class="quiet">This page was saved with its text; <code>diff-transformer explore</code> takes any other.</p>`}
    </section>`}var pr={few:48,many:32},Wr=300;function Vr(){let[t,e]=H(tt);return z(()=>{let r=matchMedia("(prefers-color-scheme: dark)"),n=()=>e(tt());return r.addEventListener("change",n),()=>r.removeEventListener("change",n)},[]),t}function Gr(t,e){let r=t.examples[0],n={...or,text:r?.text??"",answer:r?.answer??null};return it(e,n,t.models)}function Kr({on_answer:t,removed:e}){let r=t??e;if(!r)return null;let n={layer:1,head:1,number:-1};return r.forEach((a,o)=>a.forEach((i,s)=>{i>n.number&&(n={layer:o+1,head:s+1,number:i})})),{layer:n.layer,head:n.head}}function dr({data:t,source:e,root:r}){let{models:n}=t,a=Object.keys(n),o=Vr(),i=e.hasAddress?location.hash:"",[s,l]=H(()=>Gr(t,i)),[h,c]=H({}),[u,f]=H({}),[p,d]=H(null),[x,_]=H(null),m=G(()=>Object.fromEntries(["left","right"].map(b=>[b,{run:new be,map:new be}])),[]),g=E({}),v=E(i.length>1?{left:!0,right:!0}:{}),y=Lt(b=>l(N=>({...N,...b instanceof Function?b(N):b})),[]),w=b=>{let N={side:b,text:s.text};return s.added[b].length&&(N.append=s.added[b]),b==="left"&&ae(s.lambdas)&&(N.lambdas=s.lambdas),N},k=b=>s.answer&&(b==="left"||t.shared_vocabulary)?{answer:s.answer}:{};for(let b of a){let N=w(b),P={...N,...k(b)};z(()=>{if(!s.text.trim())return;let Y=n[b].layers*n[b].heads>64?pr.many:pr.few;m[b].run.ask(async()=>{try{let re=await e.run(P);if(d(W=>W?.side===b?null:W),c(W=>({...W,[b]:{heads:W[b]?.heads,...re}})),m[b].run.waits||re.heads)return;let ie=await e.run({...P,picture:Y});c(W=>({...W,[b]:ie}));let F=v.current[b]?null:Kr(ie.heads);if(F&&(v.current[b]=!0),!F)return;if(y({[b]:F}),b==="left"&&n.right&&!s.answer&&!v.current.right){let{layers:W,heads:le}=n.right;y({right:{layer:Math.min(F.layer,W),head:Math.min(F.head,le)}})}}catch(re){d({side:b,message:re.message})}})},[JSON.stringify(P)]);let X=s[b];z(()=>{s.text.trim()&&m[b].map.ask(async()=>{try{let{append:Y,...re}=N,ie=JSON.stringify([re,X]),F=g.current[b],le=F?.key===ie&&F.append.every((Ue,mr)=>Y?.[mr]===Ue)&&Y?.length>F.append.length?F.maps.length:0,pt={...N,layer:X.layer,head:X.head};le&&(pt.first_row=le);let dt=Pe(await e.map(pt),F?.maps);g.current[b]={key:ie,append:Y??[],maps:dt},f(Ue=>({...Ue,[b]:{...dt,head:X,firstRow:le}}))}catch(Y){d({side:b,message:Y.message})}})},[JSON.stringify([N,X])])}let C=h.left,M=C?.tokens.length??0,I=s.added.left.length?M-1:s.answer?.query??M-1,q=Math.max(0,Math.min(x??s.row??I,M-1));z(()=>{r.dataset.theme=o,r.dataset.ready=String(!!(C?.heads&&u.left))}),z(()=>{if(!e.hasAddress)return;let b=setTimeout(()=>history.replaceState(null,"",Ne(s)),Wr);return()=>clearTimeout(b)},[s]),z(()=>{if(!e.hasAddress)return;let b=()=>l(N=>it(location.hash,N,n));return addEventListener("hashchange",b),()=>removeEventListener("hashchange",b)},[]);let L=b=>N=>{v.current[b]=!0,y({[b]:N})},R=b=>y({lambdas:b});return $`
    <header class="top">
      <h1>See the noise cancel</h1>
      <p class="lead">
        Each head of a Differential Transformer looks at the text twice, and takes the second look, times${" "}
        <i>λ</i>, away from the first: <span class="formula">A<sub>1</sub> − λA<sub>2</sub></span>.${" "}
        What both looks share is noise, and it cancels; what only the first one sees is left.${" "}
        <strong>Move λ</strong> and watch what the model attends to and what it would write next.
      </p>
    </header>
    ${p&&$`<p class="refusal" role="alert">${p.message}</p>`}
    <main class="layout">
      <div class="controls">
        <${ir} model=${n.left} run=${C} place=${s.left} lambdas=${s.lambdas} onChange=${R} />
        <${lr} run=${C} right=${h.right} models=${n} />
        <${cr} data=${t} source=${e} view=${s} onChange=${y} onRefusal=${d} />
        ${e.live&&$`<${Bt} models=${n} runs=${h} view=${s} source=${e} question=${w}
            onChange=${y} onRefusal=${d} />`}
      </div>
      <div class="pictures">
        <${ar} models=${n} runs=${h} maps=${u} view=${s} theme=${o} row=${q} hovered=${x}
          shared=${t.shared_vocabulary} onHover=${_} onChange=${y} live=${e.live} hasAddress=${e.hasAddress} />
        <div class="grids">
          ${a.map(b=>$`<${Qt} key=${b} side=${b} model=${n[b]} run=${h[b]}
              chosen=${s[b]} theme=${o} onChoose=${L(b)} />`)}
        </div>
      </div>
    </main>
    <footer>
      <p>
        Differential attention: <a href="https://arxiv.org/abs/2410.05258" rel="noreferrer">arXiv 2410.05258</a>.${" "}
        ${a.map(b=>`${n[b].name}: ${n[b].label}, ${Jr(n[b])}`).join("; ")}.
      </p>
    </footer>
  `}function Jr({layers:t,heads:e,kv_heads:r}){let n=r!==e?` over ${r} key/value heads`:"";return`${t} ${t===1?"layer":"layers"} of ${e} ${e===1?"head":"heads"}${n}`}var ur=(t,e)=>t.reduce((r,n)=>Math.abs(n.value-e)<Math.abs(r.value-e)?n:r),Re=class{live=!1;hasAddress=!0;#e=new Map;constructor(e,r){this.recorded=e,this.models=r}async run({side:e,lambdas:r,answer:n,picture:a}){let{learned:o,all:i,layers:s}=this.recorded.runs[e],{heads:l,...h}=o,c=r&&ae(r)?r:null,u=Object.keys(c?.layers??{}).at(-1),f=null;return u!==void 0?f=ur(s[u],c.layers[u]):c&&c.all!==null&&(f=ur(i,c.all)),f&&Object.assign(h,f.run,{recorded_at:f.value}),a&&(h.heads=c?this.#t(e,c,n,l.picture_size):l),h}async map({side:e,layer:r,head:n}){return xe(this.recorded.maps[e][`${r}.${n}`])}#t(e,r,n,a){let{layers:o,heads:i}=this.models[e],s={removed:[],on_answer:n?[]:null,picture_size:a,pictures:new Int8Array(o*i*a*a)};for(let l=1,h=0;l<=o;l++){s.removed.push([]),s.on_answer?.push([]);for(let c=1;c<=i;c++,h++){let u=this.#r(e,l,c),f=oe(r,{layer:l,head:c}),p=Te(u,f),d=0;for(let g=0;g<p.length;g++)d+=Math.max(0,Math.min(u.first[g],u.first[g]-p[g]));if(s.removed.at(-1).push(d/u.length),n){let g=V(p,n.query).map(Math.abs),v=y=>y.reduce((w,k)=>w+k,0);s.on_answer.at(-1).push(v(g.subarray(n.begin,n.end))/(v(g)||1))}let x=_e(u.length,p),m=nt(p,u.length,a).map(g=>Math.round(127*Math.sign(g)*Math.sqrt(Math.min(1,Math.abs(g)/x))));s.pictures.set(m,h*a*a)}}return s}#r(e,r,n){let a=`${e} ${r}.${n}`;return this.#e.has(a)||this.#e.set(a,Pe(xe(this.recorded.maps[e][`${r}.${n}`]))),this.#e.get(a)}};var je=class{live=!0;hasAddress=!1;#e=new Map;#t=0;constructor(e){this.model=e,e.on("msg:custom",({id:r,error:n,answer:a},o)=>{let i=this.#e.get(r);i&&(this.#e.delete(r),n?i.reject(new se(n)):i.resolve(o?.length?Xr(o[0]):a))})}#r(e,r){let n=`${this.#t++} ${Math.random()}`;return new Promise((a,o)=>{this.#e.set(n,{resolve:a,reject:o}),this.model.send({id:n,name:e,question:r})})}run=e=>this.#r("run",e);map=e=>this.#r("map",e);next=e=>this.#r("next",e);example=e=>this.#r("example",e)},Xr=t=>t instanceof ArrayBuffer?t:t.buffer.slice(t.byteOffset,t.byteOffset+t.byteLength);function fr(t,e,r){t.classList.add("explorer"),Ce($`<${dr} data=${e} source=${r} root=${t} />`,t)}function Yr({model:t,el:e}){return fr(e,t.get("described"),new je(t)),()=>Ce(null,e)}var Zo={render:Yr},hr=document.getElementById("explorer-data");if(hr){let t=JSON.parse(hr.textContent),e=t.mode==="recorded"?new Re(t.recorded,t.models):new Le;fr(document.getElementById("explorer"),t,e)}export{Zo as default};
